//! The per-CPU reference count.
//!
//! The object is a [`Watched`]: a thread that looks at it holds a reference, and the release closure
//! frees it. So a release that comes early, or that is not ordered after every look, fails the
//! model; one that never comes leaves the count from zero at the end.

use std::sync::atomic::Ordering;

use offlock_percpu::sync::atomic::{AtomicPtr, AtomicUsize};
use offlock_percpu::sync::cell::UnsafeCell;
use offlock_percpu::sync::quarantine::{Watched, free};
use offlock_percpu::sync::virtual_cpu::{set_current, take_id};
use offlock_percpu::sync::{Arc, thread};
use offlock_percpu::{CpuId, KillError, PercpuRef, ResurrectError};

use super::{Long, both_modes, with_sections};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("put: the use is done", "refcount::inv07_the_last_put_releases_what_others_used"),
    ("fold: no section still counts", "refcount::inv09_a_kill_counts_what_races_with_it"),
    ("get: not killed", "refcount::inv08_no_get_after_the_kill"),
    ("kill: unlock before the callbacks", "refcount::inv11_callbacks_may_use_the_count"),
    (
        "get: what was done before the new life",
        "refcount::inv10_a_get_sees_what_was_done_before_the_new_life",
    ),
    (
        "kill: what the killer did before",
        "refcount::inv08_the_state_of_a_count_carries_what_led_to_it",
    ),
    (
        "fold: the holders of the word",
        "refcount::inv07_a_switch_on_another_thread_carries_the_uses",
    ),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] = &[
    "put: the use is done",
    "get: what was done before the new life",
    "kill: what the killer did before",
    "fold: the holders of the word",
];

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
        Arc::new(Self { refs: refs.unwrap(), value: AtomicPtr::new(value), released })
    }

    /// Looks at the object; the caller holds a reference.
    fn look(&self) {
        // SAFETY: freed by the release closure only, and the caller's reference keeps that away.
        assert_eq!(**unsafe { &*self.value.load(Ordering::Relaxed) }, 7);
    }

    fn try_look(&self) -> bool {
        self.refs.try_get_even_killed().map(|_reference| self.look()).is_some()
    }

    fn assert_released(&self) {
        assert!(self.refs.is_zero(), "{:?} {:?}", self.refs, self.released);
        assert_eq!(self.released.load(Ordering::Relaxed), 1);
        assert!(self.refs.try_get_even_killed().is_none() && self.refs.try_get().is_none());
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

/// A holder on one thread, a switch to atomic mode on a second and a kill on a third: the release
/// comes after the holder's use.
#[test]
fn inv07_a_switch_on_another_thread_carries_the_uses() {
    both_modes(|| {
        let object = Object::new();
        let holder = spawn(&object, |object| {
            set_current(CpuId::new(1));
            object.try_look();
        });
        let switcher = spawn(&object, |object| object.refs.switch_to_atomic());
        object.refs.kill().unwrap();
        holder.join().unwrap();
        switcher.join().unwrap();
        object.assert_released();
    });
}

/// An owned reference on another thread and a kill: the closure runs once, and the count is freed by
/// the last owner, after every use.
#[test]
fn inv07_an_owned_reference_outlives_the_owner() {
    both_modes(|| {
        let released = Arc::new(AtomicUsize::new(0));
        let value = Box::into_raw(Box::new(Watched::new(7_u64)));
        let refs = PercpuRef::new({
            let (released, value) = (Arc::clone(&released), Address(value));
            move || {
                let Address(value) = { value };
                released.fetch_add(1, Ordering::Relaxed);
                // SAFETY: made above; the closure runs once.
                free(unsafe { Box::from_raw(value) });
            }
        });
        let refs = std::sync::Arc::new(refs.unwrap());
        let (mine, value) = (refs.try_get_arc().expect("live"), Address(value));
        let other = thread::spawn(move || {
            let Address(value) = { value };
            set_current(CpuId::new(1));
            // SAFETY: `mine` keeps the release closure from freeing it.
            assert_eq!(**unsafe { &*value }, 7);
            drop(mine);
        });
        refs.kill().unwrap();
        assert!(refs.try_get_arc().is_none());
        drop(refs);
        other.join().unwrap();
        assert_eq!(released.load(Ordering::Relaxed), 1);
    });
}

/// A thread without an id meets a kill: what it takes back must not land after the fold.
#[test]
fn inv07_a_thread_without_id_does_not_release_early() {
    with_sections(true, || {
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

/// A thread that sees the confirmation of the kill gets no reference, although some are left.
#[test]
fn inv08_no_get_after_the_kill() {
    both_modes(|| {
        let object = Object::new();
        object.refs.switch_to_atomic();
        let confirmed = Arc::new(AtomicUsize::new(0));
        let other = spawn(&object, {
            let confirmed = Arc::clone(&confirmed);
            move |object| {
                // Ordering: Acquire pairs with the Release in the closure below.
                let before = confirmed.load(Ordering::Acquire);
                if let Some(_reference) = object.refs.try_get() {
                    assert_eq!(before, 0, "taken after the kill");
                    object.look();
                }
            }
        });
        let mine = object.refs.try_get().unwrap();
        // Ordering: Release pairs with the Acquire above.
        object.refs.kill_and_confirm(|| confirmed.store(1, Ordering::Release)).unwrap();
        assert!(object.refs.try_get_even_killed().is_some(), "mine is left");
        drop(mine);
        other.join().unwrap();
        object.assert_released();
    });
}

/// The same from percpu mode, where the words are still open when the kill begins.
#[test]
fn inv08_no_get_after_the_kill_of_percpu_words() {
    let _long = Long::mark();
    both_modes(|| {
        let object = Object::new();
        let confirmed = Arc::new(AtomicUsize::new(0));
        let others = [0, 1].map(|cpu| {
            let confirmed = Arc::clone(&confirmed);
            spawn(&object, move |object| {
                set_current(CpuId::new(cpu));
                let before = confirmed.load(Ordering::Acquire);
                if let Some(_reference) = object.refs.try_get() {
                    assert_eq!(before, 0, "taken after the kill");
                    object.look();
                }
            })
        });
        object.refs.kill_and_confirm(|| confirmed.store(1, Ordering::Release)).unwrap();
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

/// There and back under traffic: nothing is lost, and nothing is released.
#[test]
fn inv09_a_switch_to_atomic_loses_no_get_and_no_put() {
    both_modes(|| {
        let object = Object::new();
        let other = spawn(&object, |object| {
            set_current(CpuId::new(1));
            let first = object.refs.try_get().expect("live");
            object.look();
            let second = first.clone();
            set_current(CpuId::new(0));
            drop(first);
            drop(second);
        });
        object.refs.switch_to_atomic();
        assert!(!object.refs.is_zero());
        object.refs.switch_to_percpu();
        other.join().unwrap();
        assert_eq!(object.released.load(Ordering::Relaxed), 0);
        object.refs.kill().unwrap();
        object.assert_released();
    });
}

/// Two threads without an id share the remote word, during a kill.
#[test]
fn inv09_a_thread_without_id_counts_remotely() {
    with_sections(true, || {
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

/// A put by a thread that still saw the atomic mode, while a get already uses the words again.
#[test]
fn inv10_a_resurrection_keeps_the_references() {
    let _long = Long::mark();
    both_modes(|| {
        let object = Object::new();
        object.refs.try_get().unwrap().leak();
        object.refs.kill().unwrap();
        let putter = spawn(&object, |object| {
            object.look();
            // SAFETY: the reference leaked above.
            unsafe { PercpuRef::put(&object.refs) };
        });
        let getter = spawn(&object, |object| {
            set_current(CpuId::new(1));
            object.try_look();
        });
        match object.refs.resurrect() {
            Ok(()) => {
                object.look();
                assert_eq!(object.refs.resurrect(), Err(ResurrectError::NotDying));
                object.refs.kill().unwrap();
            }
            Err(refused) => assert_eq!(refused, ResurrectError::Released),
        }
        putter.join().unwrap();
        getter.join().unwrap();
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

/// How a count begins a new life.
#[derive(Clone, Copy)]
enum Renewal {
    /// From atomic mode, in which it stays.
    ResurrectAtomic,
    Resurrect,
    Reinit,
    ReinitAtomic,
}

/// A thread that gets a reference in a new life sees what was done to the object before.
#[test]
fn inv10_a_get_sees_what_was_done_before_the_new_life() {
    use Renewal::{Reinit, ReinitAtomic, Resurrect, ResurrectAtomic};
    for renewal in [ResurrectAtomic, Resurrect, Reinit, ReinitAtomic] {
        for id in [true, false] {
            both_modes(move || get_in_a_new_life(renewal, id));
        }
    }
}

fn get_in_a_new_life(renewal: Renewal, id: bool) {
    let refs = Arc::new(PercpuRef::new(|| ()).unwrap());
    let data = Plain::new();
    if matches!(renewal, Renewal::ResurrectAtomic | Renewal::ReinitAtomic) {
        refs.switch_to_atomic();
    }
    let old = matches!(renewal, Renewal::ResurrectAtomic | Renewal::Resurrect);
    let old = old.then(|| refs.try_get().unwrap());
    refs.kill().unwrap();
    let other = thread::spawn({
        let (refs, data) = (Arc::clone(&refs), Arc::clone(&data));
        move || {
            if !id {
                take_id();
            }
            if let Some(_reference) = refs.try_get() {
                data.read();
            }
        }
    });
    data.write();
    if old.is_some() {
        refs.resurrect().unwrap();
    } else {
        refs.reinit(|| ()).map_err(|_| ()).unwrap();
    }
    drop(old);
    other.join().unwrap();
    refs.kill().unwrap();
    assert!(refs.is_zero());
}

/// A thread that finds the count killed sees what the killer did before, and one that finds it at
/// zero sees what the holders did.
#[test]
fn inv08_the_state_of_a_count_carries_what_led_to_it() {
    both_modes(|| {
        let refs = Arc::new(PercpuRef::new(|| ()).unwrap());
        let (before_kill, before_put) = (Plain::new(), Plain::new());
        let holder = refs.try_get().unwrap();
        let killer = thread::spawn({
            let (refs, before_kill) = (Arc::clone(&refs), Arc::clone(&before_kill));
            move || {
                before_kill.write();
                refs.kill().unwrap();
            }
        });
        let watcher = thread::spawn({
            let (refs, before_put) = (Arc::clone(&refs), Arc::clone(&before_put));
            move || {
                if refs.is_dying() {
                    before_kill.read();
                }
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

/// A new life begins while another thread still tries to get a reference of the old one.
#[test]
fn inv10_a_new_life_starts_from_zero_only() {
    both_modes(|| {
        let object = Object::new();
        let other = spawn(&object, |object| {
            set_current(CpuId::new(1));
            drop(object.refs.try_get_even_killed());
        });
        object.refs.kill().unwrap();
        let again = Arc::clone(&object.released);
        let renewed = object.refs.reinit(move || {
            again.fetch_add(10, Ordering::Relaxed);
        });
        if renewed.is_ok() {
            // The first closure may be about to run still, on the other thread.
            assert!(object.refs.try_get().is_some());
            object.refs.kill().unwrap();
        }
        other.join().unwrap();
        assert!(object.refs.is_zero());
        let want = if renewed.is_ok() { 11 } else { 1 };
        assert_eq!(object.released.load(Ordering::Relaxed), want);
    });
}

/// Two kills: one is told so.
#[test]
fn inv10_one_of_two_kills_is_refused() {
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
        let owner = Box::into_raw(Box::new(Watched::new(Owner { refs: refs.unwrap(), value: 7 })));
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

/// Both closures use the count they belong to: a deadlock if either ran under the lock.
#[test]
fn inv11_callbacks_may_use_the_count() {
    both_modes(|| {
        let place = Arc::new(AtomicPtr::new(std::ptr::null_mut::<PercpuRef>()));
        let released = Arc::new(AtomicUsize::new(0));
        let refs = PercpuRef::new({
            let (place, released) = (Arc::clone(&place), Arc::clone(&released));
            move || {
                // SAFETY: the count made below, dropped by the test after this ran.
                let refs = unsafe { &*place.load(Ordering::Relaxed) };
                assert!(refs.is_zero() && refs.try_get_even_killed().is_none());
                assert_eq!(refs.kill(), Err(KillError::AlreadyDying));
                assert_eq!(refs.resurrect(), Err(ResurrectError::Released));
                released.fetch_add(1, Ordering::Relaxed);
            }
        });
        let refs = Arc::new(refs.unwrap());
        place.store(Arc::as_ptr(&refs).cast_mut(), Ordering::Relaxed);
        let other = thread::spawn({
            let refs = Arc::clone(&refs);
            move || {
                set_current(CpuId::new(1));
                drop(refs.try_get_even_killed());
            }
        });
        refs.kill_and_confirm(|| {
            assert!(refs.is_dying() && refs.try_get().is_none());
            assert!(refs.try_get_even_killed().is_some(), "the initial reference is still there");
            refs.switch_to_atomic();
        })
        .unwrap();
        other.join().unwrap();
        assert_eq!(released.load(Ordering::Relaxed), 1);
    });
}
