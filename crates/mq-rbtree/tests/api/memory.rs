//! Memory: when it is allocated, what happens if there is none, and that nothing is allocated,
//! freed or dropped under the lock.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt::{self, Debug, Write};
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::pin;
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};

use mq_rbtree::{
    Bitmap, BuildError, Builder, Levels, PRIORITIES, Queue, QueueStats, RbTree, ReceiveError,
    SendRefused,
};
use testkit::alloc::{Calls, calls, refuse_after, refuse_first};

thread_local! {
    /// A queue that must not be locked during a call of the allocator.
    static PROBE: Cell<Option<NonNull<dyn Debug>>> = const { Cell::new(None) };
    /// The calls with that queue locked.
    static HELD: Cell<Calls> = const { Cell::new(Calls::NONE) };
}

/// Finds the field in a queue's `Debug` output that is there only if the lock was free.
struct FindsLen(bool);

impl Write for FindsLen {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 |= text == "len";
        Ok(())
    }
}

/// Counts a call of the allocator if the probed queue is locked: by this thread, because no other thread
/// uses it.
pub(crate) fn probe(call: Calls) {
    let Some(queue) = PROBE.take() else { return };
    let mut free = FindsLen(false);
    // SAFETY: the queue outlives the time during which it is in `PROBE`: see `watched`.
    write!(free, "{:?}", unsafe { queue.as_ref() }).unwrap();
    PROBE.set(Some(queue));
    if !free.0 {
        let Calls { allocated, freed } = HELD.get();
        HELD.set(Calls { allocated: allocated + call.allocated, freed: freed + call.freed });
    }
}

/// Runs `f`; returns the calls of the allocator that it made with the queue locked.
fn watched<T, L: Levels, R>(queue: &Queue<T, L>, f: impl FnOnce() -> R) -> Calls {
    HELD.set(Calls::NONE);
    let probe: NonNull<dyn Debug + '_> = NonNull::from(queue);
    // SAFETY: only the lifetime changes, and the pointer is removed before the borrow of the queue
    // ends.
    PROBE.set(Some(unsafe {
        std::mem::transmute::<NonNull<dyn Debug + '_>, NonNull<dyn Debug>>(probe)
    }));
    drop(f());
    PROBE.set(None);
    HELD.get()
}

/// Generates pseudo-random priorities, the same ones each time.
fn priorities(seed: u32) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % PRIORITIES
    }
}

/// Returns the queue's own count of allocations under the lock.
fn fallbacks(stats: &QueueStats) -> u64 {
    stats.levels.fallback + stats.slab_fallback
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

/// Staged messages have their memory before they are accepted: the drain allocates nothing, and no
/// growth of the queue allocates under the lock.
#[test]
fn inv23_a_drain_allocates_nothing() {
    let queue: Queue<u32> = Queue::new(10_000).unwrap();
    let mut priority = priorities(5);
    let held = watched(&queue, || {
        for round in 0..60 {
            (0..150).for_each(|n| queue.send(n, priority()).unwrap());
            assert_eq!(calls(|| queue.len()).1, Calls::NONE);
            (0..round).for_each(|_| assert!(queue.receive().is_ok()));
        }
    });
    queue.validate();
    assert_eq!((held, fallbacks(&queue.stats())), (Calls::NONE, 0));
}

/// Each node beyond the kept ones is allocated before the lock and freed after it.
#[test]
fn inv04_nodes_beyond_the_cache_are_allocated_and_freed_outside_the_lock() {
    for spare in [0, 10] {
        let queue: Queue<u32, RbTree<u32>> =
            Queue::builder_with_keys(2_000).spare_nodes(spare).build().unwrap();
        let mut burst = bursts(&queue);
        let mut count = Calls::NONE;
        let held = watched(&queue, || count = calls(&mut burst).1);
        assert!(count.allocated > 900 && count.freed > 900, "{count:?}");
        assert_eq!(held, Calls::NONE);
        assert_eq!(fallbacks(&queue.stats()), 0);
        assert_eq!(queue.stats().levels.kept, spare);
    }
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

/// Checks where messages that own memory are dropped.
fn leaves_the_lock_before_it_frees<L: Levels<Priority = u32>>() {
    let builder = Builder::<Box<u32>, L>::new(300).spare_nodes(3);
    let (queue, receiver) = builder.channel().unwrap();
    let mut priority = priorities(3);
    let mut fill = || while queue.try_send(Box::new(1), priority()).is_ok() {};
    let held = watched(&queue, || {
        fill();
        for _ in 0..200 {
            drop(queue.try_receive());
        }
        fill();
        drop(queue.drain_filter(|_, priority| priority % 2 == 0));
        fill();
        drop(queue.drain());
        fill();
        let mut cx = Context::from_waker(Waker::noop());
        {
            let mut send = pin!(queue.send_async(Box::new(9), 9));
            assert!(send.as_mut().poll(&mut cx).is_pending());
            drop(queue.receive());
            assert!(send.as_mut().poll(&mut cx).is_ready());
            let mut send = pin!(queue.send_async(Box::new(9), 19));
            assert!(send.as_mut().poll(&mut cx).is_pending());
        }
        let mut batch: VecDeque<_> = (0..200).map(|n| (Box::new(n), n * 160)).collect();
        let _ = queue.try_send_batch(&mut batch);
        let mut out = Vec::new();
        queue.try_receive_batch(&mut out, 200).unwrap();
        let _ = queue.try_send_batch(&mut batch);
        drop(receiver);
        assert!(queue.is_closed() && queue.is_empty());
        drop(queue.try_send(Box::new(1), 1));
    });
    assert_eq!(held, Calls::NONE, "the allocator was called with the lock held");
    assert_eq!(fallbacks(&queue.stats()), 0);
}

#[test]
fn inv16_nothing_is_allocated_freed_or_dropped_under_the_lock() {
    leaves_the_lock_before_it_frees::<Bitmap>();
    leaves_the_lock_before_it_frees::<RbTree<u32>>();
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

/// Each send in turn finds no memory before the lock, gets it under the lock, and counts that.
#[test]
fn inv05_a_spare_that_cannot_be_made_before_the_lock_fails_no_send() {
    fn check<L: Levels<Priority = u32>>(at_least: u64) {
        let queue: Queue<u32, L> = Builder::new(300).spare_nodes(2).build().unwrap();
        let mut refusals = 0;
        for n in 0..200 {
            let (sent, refused) = refuse_first(1, || queue.send(n, n * 163));
            assert!(sent.is_ok(), "{sent:?}");
            refusals += refused as u64;
            assert_eq!(fallbacks(&queue.stats()), refusals);
        }
        queue.validate();
        assert!(refusals >= at_least, "{refusals}");
    }
    check::<Bitmap>(3); // chunks of 64, 128 and 256 slots
    check::<RbTree<u32>>(200);
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
