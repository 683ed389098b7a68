//! Concurrent barriers, the age bound, and the statistics.
//!
//! A process has one domain, so the tests take turns ([`alone`]).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use offlock_percpu::rcu::{self, Atomic, Bounds, Owned, SynchronizeError};

use crate::alone::alone;
use testkit::child::in_own_process;
use testkit::pin::{allowed_cpus, pin_to};

/// Runs `f` while another thread holds a guard. Dropping the sender ends that guard.
fn with_reader(f: impl FnOnce(mpsc::Sender<()>)) {
    let (tell, pinned) = mpsc::channel();
    let (leave, left) = mpsc::channel::<()>();
    thread::scope(|s| {
        s.spawn(move || {
            let _guard = rcu::pin();
            tell.send(()).unwrap();
            let _ = left.recv();
        });
        pinned.recv().unwrap();
        f(leave);
    });
}

/// A barrier that starts while another one waits for a reader waits for the same objects.
#[test]
fn inv11_barriers_at_once_wait_for_the_same_drops() {
    static RAN: AtomicBool = AtomicBool::new(false);
    let _alone = alone();
    let barrier_ran = || {
        rcu::barrier().unwrap();
        RAN.load(SeqCst)
    };
    for round in 0..50 {
        RAN.store(false, SeqCst);
        rcu::defer(0, || {
            thread::sleep(Duration::from_millis(2));
            RAN.store(true, SeqCst);
        });
        with_reader(|leave| {
            thread::scope(|s| {
                let first = s.spawn(barrier_ran);
                thread::sleep(Duration::from_millis(2));
                let second = s.spawn(barrier_ran);
                thread::sleep(Duration::from_millis(1));
                drop(leave);
                let both = (first.join().unwrap(), second.join().unwrap());
                assert_eq!(both, (true, true), "round {round}");
            });
        });
    }
}

/// A thread that retires rarely drops the objects above the age bound each time.
#[test]
fn retiring_seldom_keeps_the_age_bound() {
    static DROPS: AtomicUsize = AtomicUsize::new(0);
    struct Counted;
    impl Drop for Counted {
        fn drop(&mut self) {
            DROPS.fetch_add(1, Relaxed);
        }
    }
    let _alone = alone();
    rcu::set_bounds(Bounds::new(1 << 30, Duration::from_millis(10)));
    let run = || {
        pin_to(&[allowed_cpus()[0]]);
        let shared = Atomic::new(Counted);
        for _ in 0..6 {
            shared.store(Owned::new(Counted));
            thread::sleep(Duration::from_millis(40));
        }
    };
    thread::spawn(run).join().unwrap();
    assert!(DROPS.load(Relaxed) >= 4, "{}", rcu::stats());
}

/// The caller states the sizes of objects, and their sum saturates until the process ends.
#[test]
fn absurd_sizes_saturate() {
    in_own_process("edges::absurd_sizes_saturate", || {
        for _ in 0..2 {
            with_reader(|_leave| {
                (0..4).for_each(|_| rcu::defer(usize::MAX / 2, || ()));
                let stats = rcu::stats();
                assert_eq!((stats.pending, stats.pending_bytes), (4, u64::MAX));
            });
            rcu::barrier().unwrap();
            assert_eq!(rcu::stats().reclaimed_bytes, u64::MAX);
        }
    });
}

/// The byte bound counts the bytes that a value owns, if the caller states them.
#[test]
fn the_byte_bound_sees_what_a_value_owns() {
    let _alone = alone();
    rcu::set_bounds(Bounds::new(64 << 10, Duration::from_secs(3600)));
    let run = || {
        pin_to(&[allowed_cpus()[0]]);
        let before = rcu::stats().reclaimed_bytes;
        for _ in 0..64 {
            let unlinked = Atomic::new(vec![0_u8; 4096]).swap(Owned::new(Vec::new()));
            unlinked.retire_sized(4096);
            assert!(rcu::stats().pending_bytes <= 64 << 10, "{}", rcu::stats());
        }
        assert!(rcu::stats().reclaimed_bytes - before >= 32 * 4096, "{}", rcu::stats());
    };
    thread::spawn(run).join().unwrap();
}

#[test]
fn errors_name_their_cause_and_values_print_themselves() {
    let _alone = alone();
    let owned = Owned::new(7);
    assert_eq!(format!("{owned:?}"), "Owned(7)");
    let shared = Atomic::try_new(8).unwrap();
    assert_eq!(format!("{shared:?}"), "Atomic { .. }");
    let guard = rcu::pin();
    let unlinked = shared.swap(owned);
    assert_eq!(format!("{unlinked:?}"), "Unlinked(8)");
    let error = unlinked.reclaim().unwrap_err();
    assert_eq!(error.reason, SynchronizeError::WouldDeadlock);
    assert_eq!(error.to_string(), SynchronizeError::WouldDeadlock.to_string());
    drop(guard);
    assert_eq!(Atomic::from(9).into_inner().into_inner(), 9);
}
