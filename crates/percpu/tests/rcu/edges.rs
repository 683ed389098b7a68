//! Concurrent barriers, and errors.
//!
//! A process has one domain, so the tests take turns ([`alone`]).

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use offlock_percpu::rcu::{self, Atomic, Owned, SynchronizeError};

use crate::alone::alone;

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
    struct Slow;
    impl Drop for Slow {
        fn drop(&mut self) {
            thread::sleep(Duration::from_millis(2));
            RAN.store(true, SeqCst);
        }
    }
    let _alone = alone();
    let barrier_ran = || {
        rcu::barrier().unwrap();
        RAN.load(SeqCst)
    };
    for round in 0..50 {
        RAN.store(false, SeqCst);
        Atomic::new(Some(Slow)).store(Owned::new(None));
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

#[test]
fn errors_name_their_cause_and_values_print_themselves() {
    let _alone = alone();
    let owned = Owned::new(7);
    assert_eq!(format!("{owned:?}"), "Owned(7)");
    let shared = Atomic::new(8);
    assert_eq!(format!("{shared:?}"), "Atomic { .. }");
    let guard = rcu::pin();
    let unlinked = shared.swap(owned);
    assert_eq!(format!("{unlinked:?}"), "Unlinked(8)");
    drop(guard);
    assert!(SynchronizeError::WouldDeadlock.to_string().contains("wait for itself"));
}
