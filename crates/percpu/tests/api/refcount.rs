//! `PercpuRef` compared with a model, and on threads that exit, migrate or have no CPU id.
//!
//! The stress tests are ignored by default and run for `OFFLOCK_STRESS_SECONDS` (default 5).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::env;
use std::future::poll_fn;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::{KillError, PercpuRef, ReinitError, ResurrectError, capabilities};
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
    (refs.unwrap(), released)
}

#[derive(Clone, Debug)]
enum Op {
    TryGetEvenKilled,
    TryGet,
    Clone,
    Put,
    Kill,
    Resurrect,
    Reinit,
    ToAtomic,
    ToPercpu,
    Move(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => Just(Op::TryGetEvenKilled),
        4 => Just(Op::TryGet),
        2 => Just(Op::Clone),
        8 => Just(Op::Put),
        3 => Just(Op::Kill),
        2 => Just(Op::Resurrect),
        2 => Just(Op::Reinit),
        1 => Just(Op::ToAtomic),
        2 => Just(Op::ToPercpu),
        3 => any::<usize>().prop_map(Op::Move),
    ];
    prop::collection::vec(op, 0..120)
}

/// Runs `ops` and compares each result with two numbers: references held, and lives.
fn agrees(ops: &[Op]) -> Result<(), TestCaseError> {
    let cpus = allowed_cpus();
    let (refs, released) = counting();
    let mut held = VecDeque::new();
    let (mut live, mut zero, mut lives) = (true, false, 0);
    for op in ops {
        match op {
            Op::TryGetEvenKilled => {
                let got = refs.try_get_even_killed();
                prop_assert_eq!(got.is_some(), !zero);
                held.extend(got);
            }
            Op::TryGet => {
                let got = refs.try_get();
                prop_assert_eq!(got.is_some(), live);
                held.extend(got);
            }
            Op::Clone => held.extend(held.front().cloned()),
            Op::Put => drop(held.pop_front()),
            Op::Kill => {
                let mut confirmed = 0;
                let killed = refs.kill_and_confirm(|| {
                    confirmed += 1;
                    assert!(refs.try_get().is_none() && refs.try_get_even_killed().is_some());
                });
                prop_assert_eq!(confirmed, usize::from(live));
                let want = if live { Ok(()) } else { Err(KillError::AlreadyDying) };
                prop_assert_eq!(killed, want);
                live = false;
            }
            Op::Resurrect => {
                let want = match (live, zero) {
                    (true, _) => Err(ResurrectError::NotDying),
                    (_, true) => Err(ResurrectError::Released),
                    _ => Ok(()),
                };
                prop_assert_eq!(refs.resurrect(), want);
                live |= want.is_ok();
            }
            Op::Reinit => {
                let count = Arc::clone(&released);
                let renewed = refs.reinit(move || {
                    count.fetch_add(1, SeqCst);
                });
                match renewed {
                    Ok(()) => {
                        prop_assert!(zero);
                        lives += 1;
                        (live, zero) = (true, false);
                    }
                    Err(error) => {
                        prop_assert!(!zero);
                        prop_assert!(matches!(error, ReinitError::InUse(_)));
                        drop(error.into_release());
                    }
                }
            }
            Op::ToAtomic => refs.switch_to_atomic(),
            Op::ToPercpu => refs.switch_to_percpu(),
            Op::Move(to) => pin_to(&[cpus[to % cpus.len()]]),
        }
        zero |= !live && held.is_empty();
        prop_assert_eq!(refs.is_zero(), zero);
        prop_assert_eq!(refs.is_dying(), !live);
        prop_assert_eq!(released.load(SeqCst), lives + usize::from(zero));
    }
    pin_to(&cpus);
    drop(held);
    if live {
        refs.kill().unwrap();
    }
    prop_assert_eq!(released.load(SeqCst), lives + 1, "the last life ends");
    Ok(())
}

proptest! {
    #[test]
    fn inv10_any_sequence_of_operations_agrees_with_a_model(ops in ops()) {
        agrees(&ops)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))] // each case runs on a thread of its own

    #[test]
    fn inv10_any_sequence_on_a_thread_without_id_agrees_with_a_model(ops in ops()) {
        let alone = thread::spawn(move || {
            take_id();
            agrees(&ops)
        });
        alone.join().unwrap()?;
    }
}

#[test]
fn inv10_errors_say_what_c_would() {
    let (refs, _) = counting();
    assert_eq!(refs.resurrect().unwrap_err().errno(), libc::EINVAL);
    assert_eq!(refs.reinit(|| ()).unwrap_err().errno(), libc::EBUSY);
    refs.kill().unwrap();
    assert_eq!(refs.kill().unwrap_err().errno(), libc::EINVAL);
    assert_eq!(refs.resurrect().unwrap_err().errno(), libc::ESRCH);
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
                kept.extend([refs.try_get_even_killed(), refs.try_get()].into_iter().flatten())
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
    assert!(!refs.is_zero() && refs.try_get_even_killed().is_some());
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

/// An owned reference of a thread, and one of a task that two threads poll, outlive the owner's
/// `Arc`.
#[test]
fn inv07_an_owned_reference_keeps_the_count_from_zero_on_other_threads() {
    let (refs, released) = counting();
    let refs = Arc::new(refs);
    let alive = Arc::downgrade(&refs);
    let (go, wait) = mpsc::channel::<()>();

    let reference = refs.try_get_arc().expect("live");
    let worker = thread::spawn(move || {
        take_id();
        drop(reference.clone());
        wait.recv().unwrap_err(); // until the sender is dropped
        drop(reference);
    });
    let reference = refs.try_get_arc().expect("live");
    let mut first_poll = true;
    let mut task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
        let held = reference;
        poll_fn(|_| if std::mem::take(&mut first_poll) { Poll::Pending } else { Poll::Ready(()) })
            .await;
        drop(held);
    });
    let poll = |task: &mut Pin<Box<dyn Future<Output = ()> + Send>>| {
        task.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    };
    assert!(poll(&mut task).is_pending());

    refs.kill().unwrap();
    assert!(refs.try_get_arc().is_none() && refs.try_get_even_killed().is_some());
    drop(refs);
    assert_eq!((released.load(SeqCst), alive.strong_count()), (0, 2));
    thread::spawn(move || assert!(poll(&mut task).is_ready())).join().unwrap();
    assert_eq!((released.load(SeqCst), alive.strong_count()), (0, 1));
    drop(go);
    worker.join().unwrap();
    assert_eq!((released.load(SeqCst), alive.strong_count()), (1, 0));
}

#[test]
fn inv07_the_last_owned_reference_frees_the_count() {
    // Not killed: the closure is dropped, not called.
    let (refs, released) = counting();
    let reference = Arc::new(refs).try_get_arc().expect("live");
    drop(reference);
    assert_eq!((released.load(SeqCst), Arc::strong_count(&released)), (0, 1));

    // Killed, and the closure panics: the count is freed all the same.
    let refs = Arc::new(PercpuRef::new(|| panic!("from the closure")).unwrap());
    let alive = Arc::downgrade(&refs);
    let last = refs.try_get_arc().expect("live");
    refs.kill().unwrap();
    drop(refs);
    let panic = catch_unwind(AssertUnwindSafe(|| drop(last))).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"from the closure"));
    assert_eq!(alive.strong_count(), 0);
}

/// After a kill every get fails, in each mode of the count.
#[test]
fn inv08_try_get_refuses_after_a_kill() {
    for (id, atomic) in [(true, false), (true, true), (false, false)] {
        let killed = move || {
            if !id {
                take_id();
            }
            let (refs, released) = counting();
            if atomic {
                refs.switch_to_atomic();
            }
            let user = refs.try_get().expect("live");
            refs.kill().unwrap();
            assert!(refs.try_get().is_none(), "killed; id {id}, atomic {atomic}");
            refs.resurrect().unwrap();
            drop(refs.try_get().expect("live again"));
            refs.kill().unwrap();
            drop(user);
            assert!(refs.try_get().is_none(), "released; id {id}, atomic {atomic}");
            assert_eq!(released.load(SeqCst), 1);
        };
        thread::spawn(killed).join().unwrap();
    }
}

#[test]
fn inv11_a_panic_of_the_release_closure_reaches_whoever_put_last() {
    let refs = PercpuRef::new(|| panic!("from the closure")).unwrap();
    let last = refs.try_get().unwrap();
    refs.kill().unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| drop(last))).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"from the closure"));
    assert!(refs.is_zero());
    refs.reinit(|| ()).unwrap();
    assert!(refs.try_get().is_some());
}

#[test]
fn inv11_a_panic_of_the_confirmation_drops_the_initial_reference_all_the_same() {
    let (refs, released) = counting();
    let killed = catch_unwind(AssertUnwindSafe(|| refs.kill_and_confirm(|| panic!("confirm"))));
    assert!(killed.is_err());
    assert_eq!(released.load(SeqCst), 1);
    assert_eq!(refs.kill(), Err(KillError::AlreadyDying), "the panic left no lock held");
}

/// Runs in a process of its own: the release closure panics while the panic of `confirm` unwinds.
#[test]
fn two_panics_of_one_kill_abort() {
    const CHILD: &str = "PERCPU_TWO_PANICS";
    if env::var_os(CHILD).is_some() {
        let refs = PercpuRef::new(|| panic!("of the release closure")).unwrap();
        let _ = catch_unwind(AssertUnwindSafe(|| refs.kill_and_confirm(|| panic!("of confirm"))));
        return;
    }
    let this = env::current_exe().unwrap();
    let child = Command::new(this)
        .args(["refcount::two_panics_of_one_kill_abort", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert_eq!(child.status.signal(), Some(libc::SIGABRT), "{child:?}");
}

fn deadline() -> Instant {
    Instant::now() + stress_time(5)
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
    lives: AtomicU64,
    releases: AtomicU64,
}

impl Ledger {
    fn release(self: Arc<Self>) -> impl FnOnce() + Send + 'static {
        move || {
            assert_eq!(self.inside.load(SeqCst), 0, "released while a thread has a reference");
            self.releases.fetch_add(1, SeqCst);
        }
    }
}

impl Object {
    fn new() -> Self {
        let ledger = Arc::new(Ledger { lives: AtomicU64::new(1), ..Ledger::default() });
        Self { refs: PercpuRef::new(Arc::clone(&ledger).release()).unwrap(), ledger }
    }

    fn enter(&self) {
        self.ledger.inside.fetch_add(1, SeqCst);
        let (lives, releases) = (self.ledger.lives.load(SeqCst), self.ledger.releases.load(SeqCst));
        assert_eq!(lives, releases + 1, "a reference of a released object");
    }

    fn leave(&self) {
        self.ledger.inside.fetch_sub(1, SeqCst);
    }
}

/// Gets and puts references. Some threads have no CPU id, and some references are put by another
/// thread than took them.
fn use_objects(
    objects: &[Object],
    stash: &Mutex<Vec<usize>>,
    stop: &AtomicBool,
    seed: usize,
) -> u64 {
    if seed % 4 == 3 {
        take_id();
    }
    let (cpus, mut rng, mut gets) = (allowed_cpus(), rng::seeded(seed as u64), 0);
    while !stop.load(Relaxed) {
        let at = rng.usize(..objects.len());
        let object = &objects[at];
        let got = if rng.usize(..8) == 0 {
            object.refs.try_get_even_killed()
        } else {
            object.refs.try_get()
        };
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

/// Yields the CPU to the users of a killed object. Otherwise a preempted user may keep the count
/// above zero until the object is resurrected, and on few CPUs the test may end without a release.
fn let_users_leave(object: &Object, stop: &AtomicBool) {
    for _ in 0..1_000 {
        if object.refs.is_zero() || !object.refs.is_dying() || stop.load(Relaxed) {
            return;
        }
        thread::yield_now();
    }
}

/// Kills, resurrects and reinitialises objects and switches their mode. Returns the number of
/// kills.
fn kill_objects(objects: &[Object], stop: &AtomicBool, seed: usize) -> u64 {
    let (mut rng, mut kills) = (rng::seeded(seed as u64 + 99), 0);
    while !stop.load(Relaxed) {
        let object = &objects[rng.usize(..objects.len())];
        match rng.usize(..8) {
            0..3 => {
                let killed = object.refs.kill().is_ok();
                kills += u64::from(killed);
                if killed && rng.usize(..16) == 0 {
                    let_users_leave(object, stop);
                }
            }
            3 => drop(object.refs.resurrect()),
            4..6 if object.refs.is_zero() => {
                // Counted first, since a user may enter at once. Only one thread reinitialises.
                static RENEW: Mutex<()> = Mutex::new(());
                let _one = RENEW.lock().unwrap();
                if object.refs.is_zero() {
                    while object.ledger.releases.load(SeqCst) != object.ledger.lives.load(SeqCst) {
                        thread::yield_now(); // the release closure has not counted yet
                    }
                    object.ledger.lives.fetch_add(1, SeqCst);
                    object.refs.reinit(Arc::clone(&object.ledger).release()).unwrap();
                }
            }
            6 => object.refs.switch_to_atomic(),
            7 => object.refs.switch_to_percpu(),
            _ => {}
        }
    }
    kills
}

/// Kills many objects, or one hot object, and checks the ledger.
fn storm(objects: usize, users: usize, killers: usize) {
    let until = deadline();
    let [mut gets, mut kills, mut releases] = [0; 3];
    while keep_running(until, || gets > 10_000 && kills > 1_000 && releases > 100) {
        let more = kills_until(until.max(Instant::now() + AGAIN), objects, users, killers);
        [gets, kills, releases] = [gets + more[0], kills + more[1], releases + more[2]];
    }
    println!("{}: {gets} gets, {kills} kills, {releases} releases", capabilities());
    assert!(gets > 10_000 && kills > 1_000 && releases > 100);
}

/// The time of each further round, if the first one did too little. A guess.
const AGAIN: Duration = Duration::from_millis(500);

/// Returns the numbers of gets, kills and releases.
fn kills_until(until: Instant, objects: usize, users: usize, killers: usize) -> [u64; 3] {
    let (objects, stash): (Vec<_>, _) =
        ((0..objects).map(|_| Object::new()).collect(), Mutex::default());
    let stop = AtomicBool::new(false);
    let (gets, kills) = thread::scope(|scope| {
        let (objects, stash, stop) = (&objects, &stash, &stop);
        let users: Vec<_> = (0..users)
            .map(|seed| scope.spawn(move || use_objects(objects, stash, stop, seed)))
            .collect();
        let killers: Vec<_> = (0..killers)
            .map(|seed| scope.spawn(move || kill_objects(objects, stop, seed)))
            .collect();
        let gone =
            |threads: &[thread::ScopedJoinHandle<'_, u64>]| threads.iter().any(|t| t.is_finished());
        while Instant::now() < until && !gone(&users) && !gone(&killers) {
            thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, SeqCst);
        let sum = |threads: Vec<thread::ScopedJoinHandle<'_, u64>>| {
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        };
        (sum(users), sum(killers))
    });
    put_all(&objects, stash.into_inner().unwrap());
    let mut releases = 0;
    for object in &objects {
        if !object.refs.is_dying() {
            object.refs.kill().unwrap();
        }
        assert!(object.refs.is_zero(), "{:?}", object.refs);
        assert_eq!(object.ledger.inside.load(SeqCst), 0);
        let (lives, ended) =
            (object.ledger.lives.load(SeqCst), object.ledger.releases.load(SeqCst));
        assert_eq!(lives, ended, "every life was released once");
        releases += ended;
    }
    [gets, kills, releases]
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
