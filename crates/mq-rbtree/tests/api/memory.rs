//! Memory: when it is allocated, what happens if there is none, and that nothing is allocated,
//! freed or dropped under the lock.

use std::collections::VecDeque;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use mq_rbtree::{
    Bitmap, BuildError, Builder, Levels, PRIORITIES, Queue, RbTree, ReceiveError, SendRefused,
};
use testkit::alloc::{Calls, calls, refuse_after, refuse_first};

use crate::queue_ops::watch::{fallbacks, watched};

/// Generates pseudo-random priorities, the same ones each time.
fn priorities(seed: u32) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % PRIORITIES
    }
}

#[test]
fn the_watch_sees_what_is_allocated_and_freed_under_the_lock() {
    let queue: Queue<u32> = Queue::new(2).unwrap();
    queue.send(1, 1).unwrap();
    let use_memory = || {
        drop(std::hint::black_box(Box::new(7)));
        false
    };
    let held = watched(&queue, || queue.drain_filter(|_, _| use_memory()));
    assert!(held.allocated >= 1 && held.freed >= 1);
    assert_eq!(watched(&queue, use_memory), Calls::NONE);
}

/// Checks 0 -> 1 -> 0 and other depths, with every kind of operation.
fn allocates_nothing_in_steady_state<L: Levels<Priority = u32>>() {
    let queue: Queue<u32, L> = Builder::new(5_000).build().unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let mut batch = VecDeque::with_capacity(100);
    let mut out = Vec::with_capacity(100);
    for (depth, rounds) in [(0, 1_000), (1, 1_000), (700, 300)] {
        (0..depth).for_each(|n| queue.send(n, n * 11).unwrap());
        let mut round = || {
            queue.send(1, 7).unwrap();
            queue.receive().unwrap();
            queue.try_send(1, 32_000).unwrap();
            queue.try_receive().unwrap();
            let sent = pin!(queue.send_async(3, 12)).poll(&mut cx);
            assert!(matches!(sent, Poll::Ready(Ok(()))));
            assert!(pin!(queue.receive_async()).poll(&mut cx).is_ready());
            batch.extend((0..80).map(|n| (n, n * 401)));
            assert!(queue.try_send_batch(&mut batch).is_ok());
            assert_eq!(queue.try_receive_batch(&mut out, 80), Ok(80));
            out.clear();
            let waiting = pin!(queue.receive_async());
            if depth == 0 {
                assert!(waiting.poll(&mut cx).is_pending());
                assert_eq!(queue.try_receive(), Err(ReceiveError::Empty));
            }
        };
        round();
        let before = queue.stats();
        let ((), calls) = calls(|| (0..rounds).for_each(|_| round()));
        assert_eq!(calls, Calls::NONE, "depth {depth}");
        let after = queue.stats();
        let made = after.levels.from_preload - before.levels.from_preload;
        assert_eq!((made, fallbacks(&after)), (0, 0), "all levels were at hand");
        assert!(after.levels.from_cache > before.levels.from_cache);
        queue.drain();
    }
}

#[test]
fn inv04_nothing_is_allocated_in_steady_state() {
    allocates_nothing_in_steady_state::<Bitmap>();
    allocates_nothing_in_steady_state::<RbTree<u32>>();
}

/// Makes bursts of 1,000 messages over 32,768 levels; after the first few they allocate nothing.
fn bursts<L: Levels<Priority = u32>>(queue: &Queue<u32, L>) -> impl FnMut() + '_ {
    let mut priority = priorities(1);
    move || {
        (0..1_000).for_each(|n| queue.send(n, priority()).unwrap());
        (0..1_000).for_each(|_| assert!(queue.receive().is_ok()));
    }
}

#[test]
fn inv04_bursts_over_all_levels_allocate_nothing_after_warm_up() {
    fn check<L: Levels<Priority = u32>>() {
        let queue: Queue<u32, L> = Builder::new(1_000).build().unwrap();
        (0..1_000).for_each(|n| queue.send(n, n).unwrap()); // as many levels as it can ever have
        queue.drain();
        let mut burst = bursts(&queue);
        assert_eq!(calls(|| (0..20).for_each(|_| burst())).1, Calls::NONE);
        assert_eq!(fallbacks(&queue.stats()), 0);
    }
    check::<Bitmap>();
    check::<RbTree<u32>>();
}

/// Checks all operations, from the first one on.
fn never_allocates<L: Levels<Priority = u32>>() {
    let queue: Queue<u32, L> = Builder::new(1_000).no_alloc().build().unwrap();
    let mut batch: VecDeque<_> = (0..1_000).map(|n| (n, n * 32)).collect();
    let mut out = Vec::with_capacity(1_000);
    let ((), made) = calls(|| {
        let mut burst = bursts(&queue);
        burst();
        assert!(queue.try_send_batch(&mut batch).is_ok());
        assert!(queue.try_send(1, 1).is_err());
        assert_eq!(queue.try_receive_batch(&mut out, 1_000), Ok(1_000));
        burst();
        let mut cx = Context::from_waker(Waker::noop());
        let mut receive = pin!(queue.receive_async());
        assert!(receive.as_mut().poll(&mut cx).is_pending());
        queue.send(1, 1).unwrap();
        assert!(receive.as_mut().poll(&mut cx).is_ready());
        queue.validate();
        queue.close();
    });
    assert_eq!(made, Calls::NONE);
    let stats = queue.stats();
    assert_eq!((fallbacks(&stats), stats.levels.from_preload), (0, 0));
}

#[test]
fn inv04_a_no_alloc_queue_never_allocates() {
    never_allocates::<Bitmap>();
    never_allocates::<RbTree<u32>>();
}

/// The step machine watches all other operations.
#[test]
fn inv16_the_last_receiver_drops_the_messages_outside_the_lock() {
    let (queue, receiver) = Queue::<Box<u32>>::builder(300).channel().unwrap();
    (0..300).for_each(|n| queue.send(Box::new(n), n).unwrap());
    assert_eq!(watched(&queue, || drop(receiver)), Calls::NONE);
    assert!(queue.is_closed() && queue.is_empty());
}

/// All memory of a queue is freed, by drops of messages or of a large tree.
#[test]
fn inv16_a_deep_queue_gives_all_its_memory_back() {
    fn check<T, L: Levels<Priority = u32>>(at_least: u64, message: fn(u32) -> T) {
        let ((), calls) = calls(|| {
            let queue: Queue<T, L> = Builder::new(100_000).spare_nodes(10).build().unwrap();
            // The last ones are in the ring still.
            (0..100_000).for_each(|n| assert!(queue.send(message(n), n % PRIORITIES).is_ok()));
        });
        assert!(calls.allocated > at_least && calls.allocated == calls.freed, "{calls:?}");
    }
    check::<_, Bitmap>(100_000, Box::new);
    check::<_, RbTree<u32>>(100_000, Box::new);
    check::<_, RbTree<u32>>(32_768, |n| n);
}

#[test]
fn inv06_a_batch_without_memory_stops_at_the_message_that_needs_some() {
    let queue: Queue<u32> = Queue::new(100).unwrap();
    (0..62).for_each(|n| queue.send(n, 10).unwrap()); // a chunk has 64 places
    let mut batch: VecDeque<_> = [(1, 10), (2, 11), (3, 5_000), (4, 10)].into();
    let refused = refuse_after(0, || queue.send_batch(&mut batch)).unwrap_err();
    assert_eq!((refused.sent, refused.reason), (2, SendRefused::NoMemory));
    assert_eq!((batch, queue.len()), (VecDeque::from([(3, 5_000), (4, 10)]), 64));
    queue.validate();
}

/// A batch uses the room that its vector has.
#[test]
fn a_batch_without_memory_takes_what_has_room() {
    let queue: Queue<u32> = Queue::new(8).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    for async_batch in [false, true] {
        let mut receive = |out: &mut Vec<_>| match async_batch {
            false => queue.try_receive_batch(out, 8),
            true => match pin!(queue.receive_batch_async(out, 8)).poll(&mut cx) {
                Poll::Ready(result) => result,
                Poll::Pending => Err(ReceiveError::Empty),
            },
        };
        let mut out = Vec::new();
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        (0..8).for_each(|n| queue.send(n, 8 - n).unwrap());
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        assert_eq!((queue.len(), out.capacity()), (8, 0), "no message was taken");
        out.reserve_exact(3);
        let room = out.capacity();
        assert_eq!(refuse_after(0, || receive(&mut out)), Ok(room));
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        assert_eq!(receive(&mut out), Ok(8 - room));
        assert!(out.iter().map(|&(n, _)| n).eq(0..8));
        let mut with_room = Vec::with_capacity(1);
        assert_eq!(refuse_after(0, || receive(&mut with_room)), Err(ReceiveError::Empty));
    }
    queue.validate();
}

#[test]
fn a_queue_without_memory_for_its_messages_is_not_made() {
    // The three allocations before are the hint and the bitmap's.
    let build = || Queue::<u8>::builder(8).no_alloc().build().map(drop);
    assert_eq!(refuse_after(3, build), Err(BuildError::NoMemory));
    assert_eq!(build(), Ok(()));
}

/// A guard needs a node for the way back.
#[test]
fn a_guard_without_memory_is_refused() {
    let builder = Queue::builder_with_keys(2).spare_nodes(0).ageing(NonZeroU32::MIN);
    let queue = builder.build().unwrap();
    (1..3).for_each(|n| queue.send(n, n).unwrap());
    let (found, refused) = refuse_first(2, || queue.try_receive_guard().map(drop));
    assert_eq!((found, refused), (Err(ReceiveError::NoMemory), 2));
    assert_eq!(queue.receive(), Ok((2, 2)), "the turn of ageing stays");
}
