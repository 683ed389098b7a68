//! `PercpuRef` compared with a model, and on threads that exit, migrate or have no CPU id.
//!
//! The stress tests are ignored by default and run for `OFFLOCK_STRESS_SECONDS` (default 5).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use offlock_percpu::{KillError, PercpuRef, capabilities};
use proptest::prelude::*;

use crate::no_id::take_id;
use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng;
use testkit::stress::keep_running;
use testkit::stress::stress_time;

fn counting() -> (PercpuRef, Arc<AtomicUsize>) {
    let released = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&released);
    let refs = PercpuRef::new(move || {
        count.fetch_add(1, SeqCst);
    });
    (refs, released)
}

#[derive(Clone, Debug)]
enum Op {
    TryGet,
    Clone,
    Put,
    Kill,
    Move(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        8 => Just(Op::TryGet),
        2 => Just(Op::Clone),
        8 => Just(Op::Put),
        1 => Just(Op::Kill),
        3 => any::<usize>().prop_map(Op::Move),
    ];
    prop::collection::vec(op, 0..120)
}

/// Runs `ops` and compares each result with a flag and a number of references held.
fn agrees(ops: &[Op]) -> Result<(), TestCaseError> {
    let cpus = allowed_cpus();
    let (refs, released) = counting();
    let mut held = VecDeque::new();
    let mut live = true;
    for op in ops {
        match op {
            Op::TryGet => {
                let got = refs.try_get();
                prop_assert_eq!(got.is_some(), live);
                held.extend(got);
            }
            Op::Clone => held.extend(held.front().cloned()),
            Op::Put => drop(held.pop_front()),
            Op::Kill => {
                let want = if live { Ok(()) } else { Err(KillError::AlreadyDying) };
                prop_assert_eq!(refs.kill(), want);
                live = false;
            }
            Op::Move(to) => pin_to(&[cpus[to % cpus.len()]]),
        }
        let zero = !live && held.is_empty();
        prop_assert_eq!(refs.is_zero(), zero);
        prop_assert_eq!(released.load(SeqCst), usize::from(zero));
    }
    pin_to(&cpus);
    drop(held);
    prop_assert_eq!(refs.kill().is_ok(), live);
    prop_assert_eq!(released.load(SeqCst), 1);
    Ok(())
}

proptest! {
    #[test]
    fn inv09_any_sequence_of_operations_agrees_with_a_model(ops in ops()) {
        agrees(&ops)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))] // each case runs on a thread of its own

    #[test]
    fn inv09_any_sequence_on_a_thread_without_id_agrees_with_a_model(ops in ops()) {
        let alone = thread::spawn(move || {
            take_id();
            agrees(&ops)
        });
        alone.join().unwrap()?;
    }
}

#[test]
fn inv07_a_second_kill_says_what_c_would() {
    let (refs, _) = counting();
    refs.kill().unwrap();
    let error: std::io::Error = refs.kill().unwrap_err().into();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
}

/// References taken on one CPU and put on another, by threads that end before the kill.
#[test]
fn inv15_exited_threads_leave_the_count_right() {
    let (refs, released) = counting();
    let cpus = allowed_cpus();
    let on = |cpu: usize, f: &(dyn Fn() + Sync)| {
        thread::scope(|scope| {
            scope.spawn(|| {
                pin_to(&[cpu]);
                f();
            });
        });
    };
    for round in 0..20 {
        on(cpus[round % cpus.len()], &|| refs.try_get().unwrap().leak());
    }
    refs.kill().unwrap();
    for round in 0..20 {
        assert_eq!(released.load(SeqCst), 0);
        // SAFETY: one of the references leaked above.
        on(cpus[(round + 1) % cpus.len()], &|| unsafe { PercpuRef::put(&refs) });
    }
    assert_eq!(released.load(SeqCst), 1);
}

/// A put in the destructor of a thread-local variable, late in the exit of the thread.
#[test]
fn inv15_a_reference_in_a_thread_local_is_put_at_exit() {
    thread_local! {
        static KEPT: RefCell<Vec<offlock_percpu::Reference<'static>>> = const { RefCell::new(Vec::new()) };
    }
    let (refs, released) = counting();
    let refs: &'static PercpuRef = Box::leak(Box::new(refs));
    for id in [true, false] {
        let keep = move || {
            if !id {
                take_id();
            }
            KEPT.with_borrow_mut(|kept| {
                kept.extend([refs.try_get(), refs.try_get()].into_iter().flatten())
            });
        };
        thread::spawn(keep).join().unwrap();
    }
    refs.kill().unwrap();
    assert_eq!(released.load(SeqCst), 1);
}

#[test]
fn inv07_a_forgotten_reference_keeps_the_count_from_zero_for_ever() {
    let (refs, released) = counting();
    std::mem::forget(refs.try_get());
    refs.kill().unwrap();
    assert!(!refs.is_zero());
    drop(refs);
    assert_eq!(released.load(SeqCst), 0);
    assert_eq!(Arc::strong_count(&released), 1, "the closure was dropped, not called");
}

#[test]
fn inv07_a_live_count_that_is_dropped_releases_nothing() {
    let (refs, released) = counting();
    drop(refs.try_get());
    drop(refs);
    assert_eq!(released.load(SeqCst), 0);
    assert_eq!(Arc::strong_count(&released), 1);
}

/// After a kill every get fails, with and without a CPU id.
#[test]
fn inv08_try_get_refuses_after_a_kill() {
    for id in [true, false] {
        let killed = move || {
            if !id {
                take_id();
            }
            let (refs, released) = counting();
            let user = refs.try_get().expect("live");
            refs.kill().unwrap();
            assert!(refs.try_get().is_none(), "killed; id {id}");
            drop(user);
            assert!(refs.try_get().is_none(), "released; id {id}");
            assert_eq!(released.load(SeqCst), 1);
        };
        thread::spawn(killed).join().unwrap();
    }
}

#[test]
fn inv11_a_panic_of_the_release_closure_reaches_whoever_put_last() {
    let refs = PercpuRef::new(|| panic!("from the closure"));
    let last = refs.try_get().unwrap();
    refs.kill().unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| drop(last))).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"from the closure"));
    assert!(refs.is_zero() && refs.try_get().is_none());
}

/// An object, and the ledger with which its count is compared.
struct Object {
    refs: PercpuRef,
    ledger: Arc<Ledger>,
}

#[derive(Default)]
struct Ledger {
    /// The number of references that threads hold.
    inside: AtomicI64,
    releases: AtomicU64,
}

impl Object {
    fn new() -> Self {
        let ledger = Arc::<Ledger>::default();
        let released = Arc::clone(&ledger);
        let release = move || {
            assert_eq!(released.inside.load(SeqCst), 0, "released while a thread has a reference");
            released.releases.fetch_add(1, SeqCst);
        };
        Self { refs: PercpuRef::new(release), ledger }
    }

    fn enter(&self) {
        self.ledger.inside.fetch_add(1, SeqCst);
        assert_eq!(self.ledger.releases.load(SeqCst), 0, "a reference of a released object");
    }

    fn leave(&self) {
        self.ledger.inside.fetch_sub(1, SeqCst);
    }
}

/// Gets and puts references until every object is killed, and returns the number of gets. Some
/// threads have no CPU id, and some references are put by another thread than took them.
fn use_objects(objects: &[Object], stash: &Mutex<Vec<usize>>, seed: usize) -> u64 {
    if seed % 4 == 3 {
        take_id();
    }
    let (cpus, mut rng, mut gets) = (allowed_cpus(), rng::seeded(seed as u64), 0);
    let mut refused_in_a_row = 0;
    while refused_in_a_row < 20 * objects.len() {
        let at = rng.usize(..objects.len());
        let object = &objects[at];
        let got = object.refs.try_get();
        refused_in_a_row = if got.is_none() { refused_in_a_row + 1 } else { 0 };
        let dying = got.is_none();
        if let Some(reference) = got {
            gets += 1;
            object.enter();
            let second = (rng.usize(..4) == 0).then(|| reference.clone());
            if rng.usize(..64) == 0 {
                pin_to(&[cpus[rng.usize(..cpus.len())]]);
            }
            if rng.usize(..8) == 0 {
                reference.leak();
                stash.lock().unwrap().push(at); // still holds its reference
            } else {
                object.leave();
                drop(reference);
            }
            drop(second);
        }
        if dying || rng.usize(..8) == 0 {
            let taken = stash.lock().unwrap().pop();
            put_all(objects, taken);
        }
    }
    gets
}

fn put_all(objects: &[Object], taken: impl IntoIterator<Item = usize>) {
    for at in taken {
        objects[at].leave();
        // SAFETY: `use_objects` leaked this reference into the stash.
        unsafe { PercpuRef::put(&objects[at].refs) };
    }
}

/// Kills many objects, or one hot object, again and again, and checks the ledger.
fn storm(objects: usize, users: usize, killers: usize) {
    let until = Instant::now() + stress_time(5);
    // Each round starts threads, which takes up to a tenth of a second on a busy machine.
    let enough = |gets, kills| gets > 10_000 && kills >= 100.max(16 * objects);
    let (mut gets, mut kills) = (0, 0);
    while keep_running(until, || enough(gets, kills)) {
        gets += round(objects, users, killers);
        kills += objects;
    }
    println!("{}: {gets} gets, {kills} kills", capabilities());
    assert!(enough(gets, kills));
}

/// Kills each of `objects` new objects, and returns the number of gets.
fn round(objects: usize, users: usize, killers: usize) -> u64 {
    let objects: Vec<_> = (0..objects).map(|_| Object::new()).collect();
    let stash = Mutex::default();
    let (gets, kills) = thread::scope(|scope| {
        let (objects, stash) = (&objects, &stash);
        let users: Vec<_> =
            (0..users).map(|seed| scope.spawn(move || use_objects(objects, stash, seed))).collect();
        let kill = |object: &Object| {
            thread::yield_now(); // so that users have the object meanwhile
            usize::from(object.refs.kill().is_ok())
        };
        let killers: Vec<_> = (0..killers)
            .map(|_| scope.spawn(move || objects.iter().map(kill).sum::<usize>()))
            .collect();
        let gets = users.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>();
        (gets, killers.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>())
    });
    assert_eq!(kills, objects.len(), "each object is killed once");
    put_all(&objects, stash.into_inner().unwrap());
    for object in &objects {
        assert!(object.refs.is_zero(), "{:?}", object.refs);
        assert_eq!(object.ledger.inside.load(SeqCst), 0);
        assert_eq!(object.ledger.releases.load(SeqCst), 1);
    }
    gets
}

#[test]
#[ignore = "stress: five seconds of kills"]
fn stress_inv09_a_storm_of_kills_agrees_with_the_ledger() {
    storm(64, 6, 2);
}

#[test]
#[ignore = "stress: five seconds of kills"]
fn stress_inv09_a_storm_of_kills_on_one_object_agrees_with_the_ledger() {
    storm(1, 4, 4);
}
