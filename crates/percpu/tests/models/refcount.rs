//! The per-CPU reference count.
//!
//! The object is a [`Watched`]: a thread that looks at it holds a reference, and the release closure
//! frees it. So a release that comes early, or that is not ordered after every look, fails the
//! model; one that never comes leaves the count from zero at the end.

use std::sync::atomic::Ordering;

use offlock_percpu::{CpuId, KillError, PercpuRef};
use offlock_sync::atomic::{AtomicPtr, AtomicUsize};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::virtual_cpu::{set_current, take_id};
use offlock_sync::{Arc, thread};

use super::{Long, both_modes, model};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("put: the use is done", "refcount::inv07_the_last_put_releases_what_others_used"),
    ("kill: the uses so far are done", "refcount::inv09_a_kill_counts_what_races_with_it"),
    ("fold: no section still counts", "refcount::inv09_a_kill_counts_what_races_with_it"),
    ("fold: the holders of the word", "refcount::inv07_a_kill_releases_what_others_used"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] =
    &["put: the use is done", "kill: the uses so far are done", "fold: the holders of the word"];

/// A count, what it guards, and how often that was released.
struct Object {
    refs: PercpuRef,
    value: AtomicPtr<Watched<u64>>,
    released: Arc<AtomicUsize>,
}

impl Object {
    fn new() -> Arc<Self> {
        let value = Box::into_raw(Box::new(Watched::new(7)));
        let released = Arc::new(AtomicUsize::new(0));
        let refs = PercpuRef::new({
            let released = Arc::clone(&released);
            let value = Address(value);
            move || {
                let Address(value) = { value };
                released.fetch_add(1, Ordering::Relaxed);
                // SAFETY: ours from `into_raw`; the closure runs once.
                free(unsafe { Box::from_raw(value) });
            }
        });
        Arc::new(Self { refs, value: AtomicPtr::new(value), released })
    }

    /// Looks at the object; the caller holds a reference.
    fn look(&self) {
        // SAFETY: freed by the release closure only, and the caller's reference keeps that away.
        assert_eq!(**unsafe { &*self.value.load(Ordering::Relaxed) }, 7);
    }

    fn try_look(&self) -> bool {
        self.refs.try_get().map(|_reference| self.look()).is_some()
    }

    fn assert_released(&self) {
        assert!(self.refs.is_zero(), "{:?} {:?}", self.refs, self.released);
        assert_eq!(self.released.load(Ordering::Relaxed), 1);
        assert!(self.refs.try_get().is_none());
    }
}

struct Address<T>(*mut T);

// SAFETY: an address; the models decide which thread uses it.
unsafe impl<T> Send for Address<T> {}

fn spawn(object: &Arc<Object>, f: impl FnOnce(&Object) + Send + 'static) -> thread::JoinHandle<()> {
    let object = Arc::clone(object);
    thread::spawn(move || f(&object))
}

/// Two users and a kill: the last of them releases, after every look.
#[test]
fn inv07_the_last_put_releases_what_others_used() {
    both_modes(|| {
        let object = Object::new();
        let other = spawn(&object, |object| {
            set_current(CpuId::new(1));
            object.try_look();
        });
        let mine = object.refs.try_get().expect("live");
        object.refs.kill().unwrap();
        object.look();
        assert_eq!(object.released.load(Ordering::Relaxed), 0);
        drop(mine);
        other.join().unwrap();
        object.assert_released();
    });
}

/// A user and a kill that finds it gone: the kill releases, after the look.
#[test]
fn inv07_a_kill_releases_what_others_used() {
    both_modes(|| {
        let object = Object::new();
        let other = spawn(&object, |object| {
            set_current(CpuId::new(1));
            object.try_look();
        });
        object.refs.kill().unwrap();
        other.join().unwrap();
        object.assert_released();
    });
}

/// A thread without an id meets a kill: what it takes back must not land after the fold.
#[test]
fn inv07_a_thread_without_id_does_not_release_early() {
    model(|| {
        let object = Object::new();
        object.refs.try_get().unwrap().leak();
        let other = spawn(&object, |object| {
            take_id();
            object.try_look();
        });
        object.refs.kill().unwrap();
        object.look();
        // SAFETY: the reference leaked above.
        unsafe { PercpuRef::put(&object.refs) };
        other.join().unwrap();
        object.assert_released();
    });
}

/// A thread that sees that the kill is over gets no reference.
#[test]
fn inv08_no_get_after_the_kill() {
    let _long = Long::mark();
    both_modes(|| {
        let object = Object::new();
        let killed = Arc::new(AtomicUsize::new(0));
        let others = [0, 1].map(|cpu| {
            let killed = Arc::clone(&killed);
            spawn(&object, move |object| {
                set_current(CpuId::new(cpu));
                // Ordering: Acquire pairs with the Release below.
                let before = killed.load(Ordering::Acquire);
                if let Some(_reference) = object.refs.try_get() {
                    assert_eq!(before, 0, "taken after the kill");
                    object.look();
                }
            })
        });
        object.refs.kill().unwrap();
        // Ordering: Release pairs with the Acquire above.
        killed.store(1, Ordering::Release);
        for other in others {
            other.join().unwrap();
        }
        object.assert_released();
    });
}

/// Gets and puts on both CPUs, a reference that moves between them, and a kill in the middle.
#[test]
fn inv09_a_kill_counts_what_races_with_it() {
    both_modes(|| {
        let object = Object::new();
        object.refs.try_get().unwrap().leak();
        let other = spawn(&object, |object| {
            set_current(CpuId::new(1));
            object.look();
            // SAFETY: the reference leaked above, taken on the other CPU.
            unsafe { PercpuRef::put(&object.refs) };
            object.try_look();
        });
        object.refs.kill().unwrap();
        object.try_look();
        other.join().unwrap();
        object.assert_released();
    });
}

/// Two threads without an id share the remote word, during a kill.
#[test]
fn inv09_a_thread_without_id_counts_remotely() {
    model(|| {
        let object = Object::new();
        let others = [(); 2].map(|()| {
            spawn(&object, |object| {
                take_id();
                object.try_look();
            })
        });
        object.refs.kill().unwrap();
        for other in others {
            other.join().unwrap();
        }
        object.assert_released();
    });
}

/// Data that only the count orders.
struct Plain(UnsafeCell<u64>);

// SAFETY: the models order its one write before every read, by a count.
unsafe impl Send for Plain {}
// SAFETY: as above.
unsafe impl Sync for Plain {}

impl Plain {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn write(&self) {
        // SAFETY: as above.
        self.0.with_mut(|data| unsafe { *data = 1 });
    }

    fn read(&self) {
        // SAFETY: as above.
        assert_eq!(self.0.with(|data| unsafe { *data }), 1);
    }
}

/// A thread that finds the count at zero sees what the holders did.
#[test]
fn inv07_zero_carries_the_uses() {
    both_modes(|| {
        let refs = Arc::new(PercpuRef::new(|| ()));
        let before_put = Plain::new();
        let holder = refs.try_get().unwrap();
        let killer = thread::spawn({
            let refs = Arc::clone(&refs);
            move || refs.kill().unwrap()
        });
        let watcher = thread::spawn({
            let (refs, before_put) = (Arc::clone(&refs), Arc::clone(&before_put));
            move || {
                if refs.is_zero() {
                    before_put.read();
                }
            }
        });
        before_put.write();
        drop(holder);
        killer.join().unwrap();
        watcher.join().unwrap();
    });
}

/// Two kills: one is told so.
#[test]
fn inv07_one_of_two_kills_is_refused() {
    both_modes(|| {
        let object = Object::new();
        let refused = Arc::new(AtomicUsize::new(0));
        let kill = |object: &Object, refused: &AtomicUsize| match object.refs.kill() {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error, KillError::AlreadyDying);
                refused.fetch_add(1, Ordering::Relaxed);
            }
        };
        let other = spawn(&object, {
            let refused = Arc::clone(&refused);
            move |object| kill(object, &refused)
        });
        kill(&object, &refused);
        other.join().unwrap();
        assert_eq!(refused.load(Ordering::Relaxed), 1);
        object.assert_released();
    });
}

/// An object that holds its own count, and that the release closure frees.
struct Owner {
    refs: PercpuRef,
    value: u64,
}

/// The release closure drops the owner, on the thread that comes last: the killer or a holder.
#[test]
fn inv11_the_release_closure_may_drop_the_owner() {
    both_modes(|| {
        let released = Arc::new(AtomicUsize::new(0));
        // The closure needs the address of what it is made for.
        let place = Arc::new(AtomicPtr::new(std::ptr::null_mut::<Watched<Owner>>()));
        let refs = PercpuRef::new({
            let (place, released) = (Arc::clone(&place), Arc::clone(&released));
            move || {
                released.fetch_add(1, Ordering::Relaxed);
                // SAFETY: the owner made below; the closure runs once.
                free(unsafe { Box::from_raw(place.load(Ordering::Relaxed)) });
            }
        });
        let owner = Box::into_raw(Box::new(Watched::new(Owner { refs, value: 7 })));
        place.store(owner, Ordering::Relaxed);
        // SAFETY: not killed yet.
        unsafe { &*owner }.refs.try_get().unwrap().leak();
        let holder = Address(owner);
        let other = thread::spawn(move || {
            let Address(owner) = { holder };
            set_current(CpuId::new(1));
            // SAFETY: the reference leaked above keeps it alive.
            let shared = unsafe { &*owner };
            assert_eq!(shared.value, 7);
            let refs = std::ptr::from_ref(&shared.refs);
            // SAFETY: the reference leaked above, put once.
            unsafe { PercpuRef::put(refs) };
        });
        // SAFETY: the initial reference keeps it alive until the kill drops it.
        unsafe { &*owner }.refs.kill().unwrap();
        other.join().unwrap();
        assert_eq!(released.load(Ordering::Relaxed), 1);
    });
}
