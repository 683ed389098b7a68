//! Forks at any moment, while other threads are in the middle of things.
//!
//! The child has a copy of whatever they were doing, and nobody to finish it. Whatever it is told
//! there, it must be told: a child that hangs is a failure, as is one that dies. What a child makes
//! itself must work like anything else.
//!
//! Ignored by default: `OFFLOCK_STRESS_SECONDS` (2) says how long each test runs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use percpu::{CpuId, LgLock, PerCpuCounter, PercpuRef, ReadWriteGate, capabilities, rcu};

use testkit::stress::{keep_running, stress_time};

/// A guess: a child needs milliseconds.
const LIMIT: Duration = Duration::from_secs(20);

/// Runs `f` in a fork child; the error says how it ended if not well.
fn in_child(f: impl FnOnce()) -> Result<(), String> {
    // SAFETY: the child calls `f` and exits. glibc makes its allocator usable in it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = i32::from(catch_unwind(AssertUnwindSafe(f)).is_err());
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
    let (began, mut status) = (Instant::now(), 0);
    // SAFETY: `status` is ours.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if began.elapsed() > LIMIT {
            // SAFETY: our child, not waited for yet.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: `status` is ours.
            unsafe { libc::waitpid(child, &mut status, 0) };
            return Err(format!("hung for {LIMIT:?}"));
        }
        thread::sleep(Duration::from_micros(200));
    }
    let good = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
    good.then_some(()).ok_or_else(|| format!("status {status:#x}"))
}

/// Forks again and again while three threads do `busy`; the children do `child`.
fn storm(busy: impl Fn() + Sync, child: impl Fn()) {
    // A child copies a first use that is under way, and may wait for it (see the crate's page).
    println!("{}", capabilities());
    let until = Instant::now() + stress_time(2);
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut forks = 0;
    let told = thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    busy();
                    rounds.fetch_add(1, Relaxed);
                }
            });
        }
        let mut told = Ok(());
        // Some forks at least, however slow the machine.
        while told.is_ok() && keep_running(until, || forks > 3 && rounds.load(Relaxed) > 3) {
            forks += 1;
            told = in_child(&child);
        }
        stop.store(true, Relaxed);
        told
    });
    println!("{forks} forks during {rounds:?} rounds");
    told.unwrap_or_else(|how| panic!("child {forks}: {how}"));
    assert!(forks > 3 && rounds.into_inner() > 3);
}

#[test]
#[ignore = "stress: seconds of forks"]
fn stress_inv15_fork_storm_while_counters_are_made() {
    let old = PerCpuCounter::new();
    old.add(5);
    storm(
        || {
            let new = PerCpuCounter::new();
            new.reserve().unwrap();
        },
        || {
            let new = PerCpuCounter::new();
            new.add(2);
            old.add(1);
            assert_eq!((new.sum(), old.sum()), (2, 6));
        },
    );
}

#[test]
#[ignore = "stress: seconds of forks"]
fn stress_inv15_fork_storm_in_the_gate() {
    let gate = ReadWriteGate::new(0_u64).unwrap();
    storm(
        || {
            for _ in 0..3 {
                drop(gate.read());
            }
            *gate.write().unwrap() += 1;
        },
        || {
            for _ in 0..4 {
                drop(gate.read());
                drop(gate.write());
            }
            if let Ok(new) = ReadWriteGate::new(1) {
                *new.write().unwrap() += 1;
                assert_eq!(*new.read().unwrap(), 2);
            }
        },
    );
}

#[test]
#[ignore = "stress: seconds of forks"]
fn stress_inv15_fork_storm_in_locks() {
    let lock = LgLock::new(|_| 0_u64);
    storm(
        || {
            for _ in 0..3 {
                drop(lock.local());
                drop(lock.local_on(CpuId::new(0)));
            }
            drop(lock.global());
        },
        || {
            for _ in 0..4 {
                drop(lock.local());
                drop(lock.global());
            }
            let new = LgLock::new(|_| 0_u64);
            *new.local().unwrap() += 1;
            drop(new.global().unwrap());
        },
    );
}

#[test]
#[ignore = "stress: seconds of forks"]
fn stress_inv15_fork_storm_in_references() {
    let object = PercpuRef::new(|| ()).unwrap();
    storm(
        || {
            drop(object.try_get());
            let _ = object.switch_to_atomic();
            let _ = object.switch_to_percpu();
            let short = PercpuRef::new(|| ()).unwrap();
            drop(short.try_get());
            short.kill().unwrap();
        },
        || {
            for _ in 0..4 {
                let _ = object.switch_to_atomic();
                drop(object.try_get());
                let _ = object.switch_to_percpu();
            }
            if let Ok(new) = PercpuRef::new(|| ()) {
                drop(new.try_get());
                new.kill().unwrap();
                assert!(new.is_zero());
            }
        },
    );
}

#[test]
#[ignore = "stress: seconds of forks"]
fn stress_inv15_fork_storm_in_rcu() {
    let current = rcu::Atomic::new(1_u64);
    storm(
        || {
            let guard = rcu::pin();
            let _ = current.load(&guard);
            drop(guard);
            current.store(rcu::Owned::new(2));
            rcu::poll();
            let _ = rcu::synchronize();
        },
        || {
            for _ in 0..4 {
                let guard = rcu::pin();
                let _ = current.load(&guard);
                drop(guard);
                current.store(rcu::Owned::new(2));
                rcu::poll();
                let _ = rcu::synchronize();
                let _ = rcu::barrier();
            }
        },
    );
}

/// What a child makes after threads of its parent were asleep in the same kind of lock: nothing of
/// theirs may be found there.
#[test]
#[ignore = "stress: seconds of forks"]
fn stress_inv15_fork_storm_gates_of_a_child_wake_its_threads() {
    let old: Vec<_> = (0..8).map(|_| ReadWriteGate::new(0_u64).unwrap()).collect();
    storm(
        || {
            for gate in &old {
                drop(gate.read());
                let writer = gate.write();
                thread::yield_now(); // the others come to wait
                drop(writer);
            }
        },
        || {
            let gates: Vec<_> =
                (0..16).filter_map(|_| ReadWriteGate::new(0_u64).ok()).map(Arc::new).collect();
            for _ in 0..2 {
                let held: Vec<_> = gates.iter().map(|gate| gate.write().unwrap()).collect();
                let readers = (0..8).map(|start| {
                    let gates = gates.clone();
                    thread::spawn(move || {
                        gates.iter().cycle().skip(start).take(16).for_each(|gate| {
                            drop(gate.read().unwrap());
                        });
                    })
                });
                let readers: Vec<_> = readers.collect();
                thread::sleep(Duration::from_millis(2)); // they are asleep now
                drop(held);
                readers.into_iter().for_each(|reader| reader.join().unwrap());
            }
        },
    );
}
