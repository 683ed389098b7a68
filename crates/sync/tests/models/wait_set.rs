//! The list of waiters: no wake-up is lost, also by a wait that is cancelled.
//!
//! Where a wake-up is lost, the model deadlocks. With membarrier, because the other strategy has a fence
//! in each unlock.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::{Arc, WaitSet, Waiter, beside, thread};
use testkit::WakeCount;

use super::{long_model, model};

/// Permits, and the waiters for one.
struct Permits {
    left: AtomicU64,
    set: WaitSet,
}

impl Permits {
    fn new(left: u64) -> Arc<Self> {
        Arc::new(Self { left: AtomicU64::new(left), set: WaitSet::new() })
    }

    /// Takes a permit if there is one.
    fn take(&self) -> Option<()> {
        // Ordering: Relaxed, all; the fences of the set order the look against the change.
        let mut seen = self.left.load(Ordering::Relaxed);
        while seen > 0 {
            let (order, next) = (Ordering::Relaxed, seen - 1);
            match self.left.compare_exchange(seen, next, order, order) {
                Ok(_) => return Some(()),
                Err(now) => seen = now,
            }
        }
        None
    }

    fn give(&self) {
        // Ordering: Relaxed; the fences of the set order it.
        self.left.fetch_add(1, Ordering::Relaxed);
        self.set.wake_one();
    }

    /// Waits for a permit.
    fn wait(&self) {
        self.set.wait(None, || self.take()).expect("there is no deadline");
    }

    /// Waits until the first wake-up or not at all, and then gives up.
    fn begin_and_cancel(&self) -> bool {
        let mut waiter = pin!(self.set.waiter());
        let mut context = Context::from_waker(Waker::noop());
        let polled = waiter.as_mut().poll(&mut context, || self.take());
        thread::yield_now();
        polled == Poll::Ready(())
    }
}

/// One waits, and one gives: fails if either fence is missing.
#[test]
fn inv26_a_change_beside_the_wait_is_seen() {
    model(|| {
        let permits = Permits::new(0);
        let waiter = beside(&permits, Permits::wait);
        permits.give();
        waiter.join().unwrap();
        assert_eq!(permits.left.load(Ordering::Relaxed), 0);
    });
}

/// Two wait, and two permits come at once.
#[test]
fn inv26_two_waiters_get_a_permit_each() {
    long_model(|| {
        let permits = Permits::new(0);
        let waiter = beside(&permits, Permits::wait);
        let giver = beside(&permits, |permits| {
            permits.give();
            permits.give();
        });
        permits.wait();
        waiter.join().unwrap();
        giver.join().unwrap();
    });
}

/// All waiters are woken at once.
#[test]
fn inv26_wake_all_wakes_each() {
    long_model(|| {
        let permits = Permits::new(0);
        let waiters = [(); 2].map(|()| beside(&permits, Permits::wait));
        permits.left.fetch_add(2, Ordering::Relaxed);
        permits.set.wake_all();
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

/// Two wait. One looks, because it was woken or because it likes to, while a permit comes: the other one is
/// woken for it.
#[test]
fn inv26_a_unit_beside_a_look_wakes_another() {
    for is_woken in [true, false] {
        model(move || {
            let permits = Permits::new(0);
            let woken = [(); 2].map(|()| WakeCount::new());
            let (mut first, mut second) = (pin!(permits.set.waiter()), pin!(permits.set.waiter()));
            let poll = |waiter: Pin<&mut Waiter<'_>>, nth: usize| {
                waiter.poll(&mut Context::from_waker(&woken[nth].waker()), || permits.take())
            };
            assert!(poll(first.as_mut(), 0).is_pending() && poll(second.as_mut(), 1).is_pending());
            permits.left.fetch_add(1, Ordering::Relaxed);
            if is_woken {
                permits.set.wake_for(1);
            }
            let giver = beside(&permits, move |permits| {
                if !is_woken {
                    permits.set.wake_for(1); // after the look, perhaps
                }
                let left = permits.left.fetch_add(1, Ordering::Relaxed) + 1;
                permits.set.wake_for(left as usize); // as many waiters as there are permits
            });
            assert!(poll(first.as_mut(), 0).is_ready());
            giver.join().unwrap();
            assert!(woken[1].count() > 0, "a permit is left");
        });
    }
}

/// A wait that is cancelled after it was woken leaves the permit to the other waiter.
#[test]
fn inv27_a_cancelled_wait_passes_its_wake_up_on() {
    long_model(|| {
        let permits = Permits::new(0);
        let cancelled = beside(&permits, |permits| {
            if permits.begin_and_cancel() {
                permits.give(); // it got the permit before it could be cancelled
            }
        });
        let giver = beside(&permits, Permits::give);
        permits.wait();
        cancelled.join().unwrap();
        giver.join().unwrap();
    });
}
