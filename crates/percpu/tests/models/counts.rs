//! The reference counts: that of a `PercpuRef`, and those of a `RefBlock`.
//!
//! An [`Object`] has a count and a value. The thread that ends the count frees the value. A thread
//! that looks at the value holds a reference. So an end that comes early, or that is not ordered
//! after every look, fails the model. An end that comes twice frees twice, and one that never comes
//! is missing in the number of ends.

use std::ptr;

use offlock_percpu::{CpuId, KillError, PercpuRef, RefBlock, fence};
use offlock_sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::virtual_cpu::{self, set_current, take_id};
use offlock_sync::{Arc, beside, is_planted, step, thread};

use super::{both_modes, long_model};

const ONE: CpuId = CpuId::new(1);

/// The count in use, so that its neighbour is beside it.
const I: usize = RefBlock::COUNTS - 1;

/// The gate of two lives, and a gate that is closed.
const FIRST: u64 = 1 << 40;
const SECOND: u64 = 2 << 40;
const DEAD: u64 = 1 << 63;

enum Count {
    /// Live from the start, for one life.
    Ref(PercpuRef),
    /// Count [`I`] of a block, and its gate. The object is the owner.
    OfBlock(RefBlock, AtomicU64),
}

struct Object {
    count: Count,
    value: Arc<Value>,
}

/// What the end of a count frees.
struct Value {
    life: AtomicPtr<Watched<u64>>,
    /// The object, if it goes with its count.
    owner: AtomicPtr<Watched<Object>>,
    ends: AtomicUsize,
}

impl Value {
    fn new() -> Arc<Self> {
        let (life, owner) = (AtomicPtr::new(ptr::null_mut()), AtomicPtr::new(ptr::null_mut()));
        Arc::new(Self { life, owner, ends: AtomicUsize::new(0) })
    }

    fn begin(&self, life: u64) {
        self.life.store(Box::into_raw(Box::new(Watched::new(life))), Ordering::Relaxed);
    }

    fn end(&self) {
        self.ends.fetch_add(1, Ordering::Relaxed);
        // SAFETY: from `begin`; no reference is left, and this is the end of that life.
        free(unsafe { Box::from_raw(self.life.load(Ordering::Relaxed)) });
        let owner = self.owner.load(Ordering::Relaxed);
        if !owner.is_null() {
            // SAFETY: from a box; no thread uses the object without a reference.
            free(unsafe { Box::from_raw(owner) });
        }
    }
}

impl Object {
    /// With a `PercpuRef`.
    fn with_ref() -> Self {
        let value = Value::new();
        value.begin(FIRST);
        let count = PercpuRef::new({
            let value = Arc::clone(&value);
            move || value.end()
        });
        Self { count: Count::Ref(count), value }
    }

    /// With a count that has not begun.
    fn empty() -> Self {
        let count = Count::OfBlock(RefBlock::try_new().unwrap(), AtomicU64::new(DEAD));
        Self { count, value: Value::new() }
    }

    /// With a count in its first life.
    fn with_block() -> Self {
        let object = Self::empty();
        object.begin(FIRST);
        object
    }

    /// The block and the gate, of an object that has them.
    fn block(&self) -> (&RefBlock, &AtomicU64) {
        let Count::OfBlock(block, gate) = &self.count else { panic!("a `PercpuRef`") };
        (block, gate)
    }

    /// Begins a life of a block's count.
    fn begin(&self, life: u64) {
        let (block, gate) = self.block();
        self.value.begin(life);
        if is_planted("begin: the gate opens before the count") {
            gate.store(life, Ordering::Release);
            return block.open(I);
        }
        block.open(I);
        // Ordering: Release pairs with the Acquire in `try_get`; it carries the value and the count.
        gate.store(life, Ordering::Release);
    }

    fn try_get(&self, life: u64) -> bool {
        match &self.count {
            Count::Ref(refs) => refs.try_get().map(|reference| reference.leak()).is_some(),
            Count::OfBlock(block, gate) => block.try_get(I, gate, life),
        }
    }

    /// The caller holds a reference.
    fn look(&self, life: u64) {
        // SAFETY: freed by the end only, and the caller's reference keeps that away.
        assert_eq!(**unsafe { &*self.value.life.load(Ordering::Relaxed) }, life);
    }

    /// Looks, and puts the caller's reference.
    fn leave(&self, life: u64) {
        self.look(life);
        match &self.count {
            // SAFETY: the caller's reference, which `try_get` leaked.
            Count::Ref(refs) => unsafe { PercpuRef::put(refs) },
            Count::OfBlock(block, gate) => {
                let value = Arc::as_ptr(&self.value);
                // SAFETY: the caller's reference.
                if unsafe { RefBlock::put(block, I, gate, life) } {
                    // SAFETY: the value lives as long as its object, which only this end frees.
                    unsafe { &*value }.end();
                }
            }
        }
    }

    fn try_look(&self, life: u64) -> bool {
        let got = self.try_get(life);
        if got {
            self.leave(life);
        }
        got
    }

    fn kill(&self) {
        match &self.count {
            Count::Ref(refs) => refs.kill().unwrap(),
            Count::OfBlock(block, gate) => {
                // Ordering: Relaxed; the barrier makes every later section see it.
                gate.store(DEAD, Ordering::Relaxed);
                step!("kill a count: no section still counts", fence::heavy_rseq());
                if block.fold(I) {
                    self.value.end();
                }
            }
        }
    }

    fn ends(&self) -> usize {
        self.value.ends.load(Ordering::Relaxed)
    }

    fn assert_ended(&self, lives: usize) {
        assert_eq!(self.ends(), lives);
        assert!(!self.try_get(FIRST) && !self.try_get(SECOND));
        if let Count::Ref(refs) = &self.count {
            assert!(refs.is_zero(), "{refs:?}");
        }
    }
}

/// Runs `f` on another thread, which has no CPU id if `id` is false.
fn user(object: &Arc<Object>, id: bool, f: fn(&Object)) -> thread::JoinHandle<()> {
    beside(object, move |object| {
        if !id {
            take_id();
        }
        f(object);
    })
}

type Make = fn() -> Object;

/// The objects of both kinds, in their first life.
const KINDS: [Make; 2] = [Object::with_ref, Object::with_block];

/// Runs a model of an object of each kind in both modes. The object must have ended once then.
fn each_kind(f: fn(&Arc<Object>)) {
    for make in KINDS {
        both_modes(move || {
            let object = Arc::new(make());
            f(&object);
            object.assert_ended(1);
        });
    }
}

/// Gets and puts on both CPUs, a reference that moves between them, and a kill in the middle.
#[test]
fn inv09_a_kill_counts_what_races_with_it() {
    each_kind(|object| {
        assert!(object.try_get(FIRST));
        let other = beside(object, |object| {
            set_current(ONE);
            object.leave(FIRST); // the one taken on the other CPU
            object.try_look(FIRST);
        });
        object.kill();
        assert!(!object.try_get(FIRST));
        other.join().unwrap();
    });
}

/// Two holders put after the fold, or around it: one of them is the last.
#[test]
fn inv07_one_of_two_puts_after_the_fold_is_the_last() {
    each_kind(|object| {
        assert!(object.try_get(FIRST) && object.try_get(FIRST));
        let other = beside(object, |object| {
            set_current(ONE);
            object.leave(FIRST);
        });
        object.kill();
        assert_eq!(object.ends(), 0);
        object.leave(FIRST);
        other.join().unwrap();
    });
}

/// Puts in the words only: the fold alone orders them before the end.
#[test]
fn inv07_the_fold_sees_what_holders_did() {
    each_kind(|object| {
        let others = [0, 1].map(|cpu| {
            beside(object, move |object| {
                set_current(CpuId::new(cpu));
                object.try_look(FIRST);
            })
        });
        object.kill();
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// Threads without an id count in the remote word, also one that puts what another took.
#[test]
fn inv09_threads_without_an_id_count_remotely() {
    each_kind(|object| {
        assert!(object.try_get(FIRST));
        let first = user(object, false, |object| object.leave(FIRST));
        let second = user(object, false, |object| _ = object.try_look(FIRST));
        object.kill();
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// A thread without an id meets a kill: what it takes back must not land after the fold.
#[test]
fn inv07_a_thread_without_an_id_does_not_release_early() {
    each_kind(|object| {
        assert!(object.try_get(FIRST));
        let other = user(object, false, |object| _ = object.try_look(FIRST));
        object.kill();
        object.leave(FIRST);
        other.join().unwrap();
    });
}

/// A put that is not the last may be the last thing that its object sees, in the words as in the
/// atomic.
#[test]
fn inv11_the_last_put_may_free_the_object() {
    struct Holder(*const Watched<Object>);

    // SAFETY: the object is shared, and lives as long as the thread has a reference.
    unsafe impl Send for Holder {}

    impl Holder {
        fn leave(self) {
            // SAFETY: the reference keeps the object alive until it is put.
            let object: &Object = unsafe { &*self.0 };
            object.leave(FIRST);
        }
    }

    for (make, killed_before) in KINDS.into_iter().flat_map(|make| [(make, true), (make, false)]) {
        both_modes(move || {
            let object = make();
            assert!(object.try_get(FIRST) && object.try_get(FIRST));
            let value = Arc::clone(&object.value);
            let object = Box::into_raw(Box::new(Watched::new(object)));
            value.owner.store(object, Ordering::Relaxed);
            let (ours, theirs) = (Holder(object), Holder(object));
            // SAFETY: our reference keeps it alive.
            let kill = || unsafe { &*object }.kill();
            if killed_before {
                kill();
            }
            let other = thread::spawn(move || {
                set_current(ONE);
                theirs.leave();
            });
            if !killed_before {
                kill();
            }
            ours.leave();
            other.join().unwrap();
            assert_eq!(value.ends.load(Ordering::Relaxed), 1);
        });
    }
}

/// A thread that sees that the kill is over gets no reference.
#[test]
fn inv08_no_get_after_the_kill() {
    virtual_cpu::both_modes(|| {
        long_model(|| {
            let object = Arc::new(Object::with_ref());
            let killed = Arc::new(AtomicUsize::new(0));
            let others = [0, 1].map(|cpu| {
                let killed = Arc::clone(&killed);
                beside(&object, move |object| {
                    set_current(CpuId::new(cpu));
                    // Ordering: Acquire pairs with the Release below.
                    let before = killed.load(Ordering::Acquire);
                    if object.try_look(FIRST) {
                        assert_eq!(before, 0, "taken after the kill");
                    }
                })
            });
            object.kill();
            // Ordering: Release pairs with the Acquire above.
            killed.store(1, Ordering::Release);
            others.into_iter().for_each(|other| other.join().unwrap());
            object.assert_ended(1);
        });
    });
}

/// A thread that finds the count at zero sees what the holders did.
#[test]
fn inv07_zero_carries_the_uses() {
    both_modes(|| {
        let refs = Arc::new(PercpuRef::new(|| ()));
        let before_put = Arc::new(AtomicU64::new(0));
        let holder = refs.try_get().unwrap();
        let killer = beside(&refs, |refs| refs.kill().unwrap());
        let watcher = beside(&refs, {
            let before_put = Arc::clone(&before_put);
            // Ordering: Relaxed here and below; the count orders them.
            move |refs| assert!(!refs.is_zero() || before_put.load(Ordering::Relaxed) == 1)
        });
        before_put.store(1, Ordering::Relaxed);
        drop(holder);
        killer.join().unwrap();
        watcher.join().unwrap();
    });
}

/// Two kills: one is told so.
#[test]
fn inv07_one_of_two_kills_is_refused() {
    both_modes(|| {
        let refs = Arc::new(PercpuRef::new(|| ()));
        let other = beside(&refs, PercpuRef::kill);
        let results = [refs.kill(), other.join().unwrap()];
        let refused = Err(KillError::AlreadyDying);
        assert!(results == [Ok(()), refused] || results == [refused, Ok(())], "{results:?}");
        assert!(refs.is_zero());
    });
}

/// A holder clones and puts both, moving, while the owner kills.
#[test]
fn inv21_a_clone_during_the_kill_counts() {
    both_modes(|| {
        let object = Arc::new(Object::with_block());
        assert!(object.try_get(FIRST));
        let other = beside(&object, |object| {
            let (block, gate) = object.block();
            block.get_more(I, gate, FIRST);
            set_current(ONE);
            object.leave(FIRST);
            object.leave(FIRST);
        });
        object.kill();
        other.join().unwrap();
        object.assert_ended(1);
    });
}

/// Users of one life meet its kill; when they are gone (the joins stand for the grace period) the
/// next begins, whose count is its own: exactly one reference is open when it is killed.
#[test]
fn inv21_nothing_of_a_life_counts_in_the_next() {
    for id in [true, false] {
        both_modes(move || {
            let object = Arc::new(Object::with_block());
            assert!(object.try_get(FIRST));
            let user = user(&object, id, |object| {
                object.leave(FIRST); // leaves the CPU's word at -1 or void
                set_current(ONE);
                object.try_look(FIRST);
            });
            object.kill();
            user.join().unwrap();
            assert_eq!(object.ends(), 1);
            object.begin(SECOND);
            assert!(object.try_get(SECOND), "it lives");
            let user = beside(&object, |object| _ = object.try_look(SECOND));
            object.kill();
            user.join().unwrap();
            assert_eq!(object.ends(), 1, "one reference is left");
            object.leave(SECOND);
            object.assert_ended(2);
        });
    }
}

/// An id of the life before is refused in the next, by every way to count.
#[test]
fn inv21_an_old_name_gets_nothing_in_the_next_life() {
    for id in [true, false] {
        both_modes(move || {
            let object = Arc::new(Object::with_block());
            object.kill();
            object.begin(SECOND);
            let user = user(&object, id, |object| {
                assert!(!object.try_get(FIRST) && !object.try_get(DEAD - 1));
                object.try_look(SECOND);
            });
            object.kill();
            user.join().unwrap();
            object.assert_ended(2);
        });
    }
}

/// A thread that sees the gate open finds the count open, and counts in this life.
#[test]
fn inv21_a_get_races_with_the_beginning_of_a_life() {
    for id in [true, false] {
        both_modes(move || {
            let object = Arc::new(Object::empty());
            let user = user(&object, id, |object| {
                set_current(ONE);
                let (_, gate) = object.block();
                // Ordering: Acquire, both; what follows a look at the gate happens after it.
                let lives = gate.load(Ordering::Acquire) == FIRST;
                let refused = !object.try_look(FIRST);
                assert!(!(lives && refused) || gate.load(Ordering::Acquire) == DEAD);
            });
            object.begin(FIRST);
            object.kill();
            user.join().unwrap();
            object.assert_ended(1);
        });
    }
}

/// The two counts of a block do not meet.
#[test]
fn inv21_a_neighbour_has_a_count_of_its_own() {
    both_modes(|| {
        let object = Arc::new(Object::with_block());
        let gate = Arc::new(AtomicU64::new(FIRST));
        let (block, _) = object.block();
        block.open(0);
        let user = beside(&object, {
            let gate = Arc::clone(&gate);
            move |object| {
                assert!(object.block().0.try_get(0, &gate, FIRST));
                object.try_look(FIRST);
            }
        });
        object.kill();
        user.join().unwrap();
        object.assert_ended(1);
        gate.store(DEAD, Ordering::Relaxed);
        fence::heavy_rseq();
        assert!(!block.fold(0), "one is left");
        // SAFETY: the one that the user took.
        assert!(unsafe { RefBlock::put(block, 0, &*gate, FIRST) });
    });
}
