//! Edge cases: wake-ups that are never used, keys without an order, messages alone in the ring.
#![cfg(not(offlock_model))]

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Levels, Queue, RbTree, ReceiveError, SendRefused};

use testkit::wait_until;

fn waiting<T, L: Levels>(queue: &Queue<T, L>) -> (usize, usize) {
    queue.stats().waiting
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

/// A task has a permit for a message and does not poll: the thread behind it gets the message at
/// its deadline.
#[test]
fn inv09_a_receive_does_not_time_out_beside_a_message() {
    retry_until_in_time(|| {
        let queue: Queue<u32> = Queue::new(4).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        let mut idle = pin!(queue.receive_async());
        assert!(idle.as_mut().poll(&mut cx).is_pending());
        let got = thread::scope(|scope| {
            let receiver = scope.spawn(|| queue.receive_deadline(soon()));
            wait_until(|| waiting(&queue).1 == 2 || receiver.is_finished());
            queue.send(1, 0).unwrap();
            receiver.join().unwrap()
        });
        if got == Err(ReceiveError::Timeout) {
            return false;
        }
        assert_eq!((got, queue.stats().timeouts), (Ok((1, 0)), 0));
        assert!(idle.as_mut().poll(&mut cx).is_pending());
        true
    });
}

/// A task has a permit for room and is leaked: the thread behind it sends at its deadline.
#[test]
fn inv09_a_send_does_not_time_out_beside_room() {
    retry_until_in_time(|| {
        let queue: Queue<u32> = Queue::new(1).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        queue.send(1, 0).unwrap();
        let mut forgotten = Box::pin(queue.send_async(2, 0));
        assert!(forgotten.as_mut().poll(&mut cx).is_pending());
        std::mem::forget(forgotten);
        let sent = thread::scope(|scope| {
            let sender =
                scope.spawn(|| queue.send_deadline(3, 0, soon()).map_err(|error| error.reason));
            wait_until(|| waiting(&queue).0 == 2 || sender.is_finished());
            assert_eq!(queue.try_receive(), Ok((1, 0)));
            sender.join().unwrap()
        });
        if sent == Err(SendRefused::Timeout) {
            return false;
        }
        assert_eq!((sent, queue.receive()), (Ok(()), Ok((3, 0))));
        true
    });
}

/// Repeats an attempt until it was in time, which it returns. On a machine that stalls for a
/// moment, a deadline can pass too early.
fn retry_until_in_time(attempt: impl Fn() -> bool) {
    assert!((0..20).any(|_| attempt()), "it is never in time");
}

/// A key whose comparison panics for NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Weight(f64);

impl Eq for Weight {}

impl PartialOrd for Weight {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Weight {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.partial_cmp(&other.0).expect("a number")
    }
}

#[test]
fn a_panicking_comparison_of_a_sender_loses_no_message() {
    let queue: Queue<u32, RbTree<Weight>> = Queue::with_keys(3).unwrap();
    for n in 1..=3 {
        queue.send(n, Weight(f64::from(n))).unwrap();
    }
    thread::scope(|scope| {
        let send = || catch_unwind(AssertUnwindSafe(|| queue.send(9, Weight(f64::NAN)))).is_err();
        let sender = scope.spawn(send);
        wait_until(|| waiting(&queue).0 == 1);
        assert_eq!(queue.try_receive(), Ok((3, Weight(3.0))));
        assert!(sender.join().unwrap(), "the panic is the sender's");
    });
    assert_eq!(queue.try_receive(), Ok((2, Weight(2.0))));
    assert_eq!(queue.try_receive(), Ok((1, Weight(1.0))));
    queue.validate();
}

#[test]
fn a_queue_works_after_a_panic() {
    const fn unwind_safe<T: RefUnwindSafe>() {}
    const { unwind_safe::<Queue<u32>>() };
    const { unwind_safe::<Queue<u32, RbTree<u64>>>() };
}

/// A message that is received alone from the ring takes the slot of the next one: the order is that of a
/// queue without a ring. Nothing else drains the ring in between.
#[test]
fn inv01_a_message_that_is_alone_in_the_ring_keeps_the_order() {
    for (depth, levels) in [(1, 2), (2, 2), (3, 3), (8, 3), (100, 1), (100, 8), (300, 32_768)] {
        let queue: Queue<u64> = Queue::new(depth as usize + 1).unwrap();
        let mut model = BTreeMap::<u32, VecDeque<u64>>::new();
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        for n in 0..depth + 2_000 {
            seed = seed.rotate_left(17).wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(n);
            let priority = (seed >> 32) as u32 % levels;
            queue.try_send(n, priority).unwrap();
            model.entry(priority).or_default().push_back(n);
            if n < depth {
                continue;
            }
            let mut highest = model.last_entry().unwrap();
            let next = (highest.get_mut().pop_front().unwrap(), *highest.key());
            if highest.get().is_empty() {
                highest.remove();
            }
            assert_eq!(queue.try_receive(), Ok(next), "{depth} {levels} {n}");
            if n % 97 == 0 {
                queue.validate();
            }
        }
        queue.validate();
        let rest =
            model.into_iter().rev().flat_map(|(key, all)| all.into_iter().map(move |n| (n, key)));
        assert!(queue.drain().into_iter().eq(rest));
    }
}
