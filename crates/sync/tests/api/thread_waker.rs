//! A thread that polls.

use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;

use offlock_sync::{Futex, block_on};

fn sleep(woken: &Futex, seen: u32) -> bool {
    woken.wait(seen);
    true
}

/// Wakes itself in the first poll.
fn wait() -> Waker {
    let mut polls = 0;
    let poll = |context: &mut Context<'_>| {
        polls += 1;
        context.waker().wake_by_ref();
        if polls == 2 { Poll::Ready(context.waker().clone()) } else { Poll::Pending }
    };
    block_on(poll, sleep).unwrap()
}

#[test]
fn a_thread_has_one_waker_also_for_a_wait_inside_a_poll() {
    let mut inner = None;
    let poll = |context: &mut Context<'_>| {
        if inner.is_some() {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref(); // the wait below must not take this wake-up with it
        inner = Some(wait());
        Poll::Pending
    };
    block_on(poll, sleep).unwrap();
    assert!(wait().will_wake(&inner.unwrap()));
    let other = thread::spawn(wait).join().unwrap();
    assert!(!wait().will_wake(&other));
    assert_eq!(block_on(|_| Poll::<()>::Pending, |_, _| false), None);
}

#[test]
fn a_thread_waits_also_while_it_exits() {
    static WAITED: AtomicU32 = AtomicU32::new(0);
    struct Waits;
    impl Drop for Waits {
        fn drop(&mut self) {
            wait();
            WAITED.fetch_add(1, Ordering::Relaxed);
        }
    }
    std::thread_local! {
        static BEFORE: Waits = const { Waits };
        static AFTER: Waits = const { Waits };
    }
    let exits = thread::spawn(|| {
        BEFORE.with(|_| ());
        wait();
        AFTER.with(|_| ());
    });
    exits.join().unwrap();
    assert_eq!(WAITED.load(Ordering::Relaxed), 2);
}
