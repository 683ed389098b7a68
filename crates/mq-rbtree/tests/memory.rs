//! Memory: when it is allocated, what happens if there is none, and that nothing is allocated,
//! freed or dropped under the lock. The allocator refuses, counts, and checks whether a queue is
//! locked.
#![cfg(not(offlock_model))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt::{self, Debug, Write};
use std::future::Future;
use std::pin::pin;
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};

use mq_rbtree::{
    Bitmap, Builder, Levels, PRIORITIES, Queue, QueueStats, RbTree, ReceiveError, SendRefused,
};

thread_local! {
    /// How many allocations of this thread succeed before one is refused; if negative, all.
    static LEFT: Cell<i64> = const { Cell::new(-1) };
    /// Whether all later ones are refused as well.
    static FOR_EVER: Cell<bool> = const { Cell::new(false) };
    /// The calls of the allocator: allocations, and frees.
    static CALLS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    /// A queue that must not be locked during such a call.
    static PROBE: Cell<Option<NonNull<dyn Debug>>> = const { Cell::new(None) };
    static HELD: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Finds the field in a queue's `Debug` output that is there only if the lock was free.
struct FindsLen(bool);

impl Write for FindsLen {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 |= text == "len";
        Ok(())
    }
}

/// Returns whether the probed queue is locked: by this thread, because no other thread uses it.
fn is_locked() -> bool {
    let Some(probe) = PROBE.take() else { return false };
    let mut finds_len = FindsLen(false);
    // SAFETY: the queue outlives the time during which it is in `PROBE`: see `watched`.
    write!(finds_len, "{:?}", unsafe { probe.as_ref() }).unwrap();
    PROBE.set(Some(probe));
    !finds_len.0
}

struct WatchingAllocator;

// SAFETY: the allocator is the system's, and may refuse, as any allocator may. Nothing here unwinds
// or allocates.
unsafe impl GlobalAlloc for WatchingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let ((got, back), (got_held, back_held)) = (CALLS.get(), HELD.get());
        CALLS.set((got + 1, back));
        HELD.set((got_held + u64::from(is_locked()), back_held));
        let left = LEFT.get();
        if left == 0 {
            if !FOR_EVER.get() {
                LEFT.set(-1);
            }
            return std::ptr::null_mut();
        }
        LEFT.set((left - 1).max(-1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let ((got, back), (got_held, back_held)) = (CALLS.get(), HELD.get());
        CALLS.set((got, back + 1));
        HELD.set((got_held, back_held + u64::from(is_locked())));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: WatchingAllocator = WatchingAllocator;

/// Runs `f`; returns also how many allocations and frees it made with the queue locked.
fn watched<T, L: Levels, R>(queue: &Queue<T, L>, f: impl FnOnce() -> R) -> (R, (u64, u64)) {
    HELD.set((0, 0));
    let probe: NonNull<dyn Debug + '_> = NonNull::from(queue);
    // SAFETY: only the lifetime changes, and the pointer is removed before the borrow of the queue
    // ends.
    PROBE.set(Some(unsafe {
        std::mem::transmute::<NonNull<dyn Debug + '_>, NonNull<dyn Debug>>(probe)
    }));
    let result = f();
    PROBE.set(None);
    (result, HELD.get())
}

/// Returns how many allocations and frees `f` makes.
fn calls<R>(f: impl FnOnce() -> R) -> (u64, u64) {
    let before = CALLS.get();
    let result = f();
    let after = CALLS.get();
    drop(result);
    (after.0 - before.0, after.1 - before.1)
}

/// Generates pseudo-random numbers, the same ones each time.
fn numbers(seed: u32) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
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
    let (_, held) = watched(&queue, || {
        queue.drain_filter(|_, _| {
            drop(std::hint::black_box(Box::new(7)));
            false
        })
    });
    assert!(held >= (1, 1));
    let ((), held) = watched(&queue, || drop(std::hint::black_box(Box::new(7))));
    assert_eq!(held, (0, 0));
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
        let calls = calls(|| (0..rounds).for_each(|_| round()));
        assert_eq!(calls, (0, 0), "depth {depth}");
        let after = queue.stats();
        let made = after.levels.from_preload - before.levels.from_preload;
        assert_eq!((made, fallbacks(&after)), (0, 0), "all levels were at hand");
        assert!(after.levels.from_cache > before.levels.from_cache);
        queue.drain();
    }
}

#[test]
fn inv04_a_bitmap_allocates_nothing_in_steady_state() {
    allocates_nothing_in_steady_state::<Bitmap>();
}

#[test]
fn inv04_a_tree_allocates_nothing_in_steady_state() {
    allocates_nothing_in_steady_state::<RbTree<u32>>();
}

/// Makes bursts of 1,000 messages over 32,768 levels; after the first few they allocate nothing.
fn bursts<L: Levels<Priority = u32>>(queue: &Queue<u32, L>) -> impl FnMut() + '_ {
    let mut number = numbers(1);
    move || {
        (0..1_000).for_each(|n| queue.send(n, number() % PRIORITIES).unwrap());
        (0..1_000).for_each(|_| assert!(queue.receive().is_ok()));
    }
}

#[test]
fn inv04_bursts_over_all_levels_allocate_nothing_after_warm_up() {
    let bitmap: Queue<u32> = Queue::new(1_000).unwrap();
    let mut burst = bursts(&bitmap);
    (0..20).for_each(|_| burst());
    assert_eq!(calls(|| (0..20).for_each(|_| burst())), (0, 0));
    let tree: Queue<u32, RbTree<u32>> = Queue::with_keys(1_000).unwrap();
    let mut burst = bursts(&tree);
    (0..1_000).for_each(|n| tree.send(n, n).unwrap()); // as many levels as it can ever have
    tree.drain();
    assert_eq!(calls(|| (0..20).for_each(|_| burst())), (0, 0));
    for stats in [bitmap.stats(), tree.stats()] {
        assert_eq!(fallbacks(&stats), 0);
    }
}

/// Staged messages have their memory before they are accepted: the drain allocates nothing, and no
/// growth of the queue allocates under the lock.
#[test]
fn inv23_a_drain_allocates_nothing() {
    let queue: Queue<u32> = Queue::new(10_000).unwrap();
    let mut number = numbers(5);
    let ((), held) = watched(&queue, || {
        for round in 0..60 {
            (0..150).for_each(|n| queue.send(n, number() % PRIORITIES).unwrap());
            assert_eq!(calls(|| queue.len()), (0, 0));
            (0..round).for_each(|_| assert!(queue.receive().is_ok()));
        }
    });
    queue.validate();
    assert_eq!((held, fallbacks(&queue.stats())), ((0, 0), 0));
}

/// Each node beyond the kept ones is allocated before the lock and freed after it.
#[test]
fn inv04_nodes_beyond_the_cache_are_allocated_and_freed_outside_the_lock() {
    for spare in [0, 10] {
        let queue: Queue<u32, RbTree<u32>> =
            Queue::builder_with_keys(2_000).spare_nodes(spare).build().unwrap();
        let mut burst = bursts(&queue);
        let mut count = (0, 0);
        let ((), held) = watched(&queue, || count = calls(&mut burst));
        assert!(count.0 > 900 && count.1 > 900, "{count:?}");
        assert_eq!(held, (0, 0));
        assert_eq!(fallbacks(&queue.stats()), 0);
        assert_eq!(queue.stats().levels.kept, spare);
    }
}

/// Checks all operations, from the first one on.
fn never_allocates<L: Levels<Priority = u32>>() {
    let queue: Queue<u32, L> = Builder::new(1_000).no_alloc().build().unwrap();
    let mut batch: VecDeque<_> = (0..1_000).map(|n| (n, n * 32)).collect();
    let mut out = Vec::with_capacity(1_000);
    let made = calls(|| {
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
    assert_eq!(made, (0, 0));
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
    let mut queue = Builder::<Box<u32>, L>::new(300).spare_nodes(3).build().unwrap();
    let ((), held) = watched(&queue, || {
        let mut number = numbers(3);
        let mut fill = || while queue.try_send(Box::new(1), number() % PRIORITIES).is_ok() {};
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
        queue.close();
        drop(queue.try_send(Box::new(1), 1));
    });
    assert_eq!(held, (0, 0), "the allocator was called with the lock held");
    assert_eq!(fallbacks(&queue.stats()), 0);
    queue = Builder::new(1).build().unwrap();
    drop(queue);
}

#[test]
fn inv04_nothing_is_allocated_freed_or_dropped_under_the_lock() {
    leaves_the_lock_before_it_frees::<Bitmap>();
    leaves_the_lock_before_it_frees::<RbTree<u32>>();
}

/// Sends a message to each of many priorities. If a single allocation is refused, no operation
/// fails.
fn one_failure_fails_nothing<L: Levels<Priority = u32>>(allocations: u64) {
    const MESSAGES: u32 = 200;
    let mut refused = 0;
    for nth in 0.. {
        let queue: Queue<u32, L> = Builder::new(300).spare_nodes(2).build().unwrap();
        LEFT.set(nth);
        for n in 0..MESSAGES {
            let sent = queue.send(n, n * 163);
            assert!(sent.is_ok(), "{sent:?}");
        }
        let failed = LEFT.replace(-1) < 0;
        queue.validate();
        // Memory that was refused before the lock was allocated under it, and counted.
        let stats = queue.stats();
        assert_eq!(fallbacks(&stats), u64::from(failed), "{stats}");
        refused += u64::from(failed);
        if !failed {
            break;
        }
    }
    assert_eq!(refused, allocations);
}

#[test]
fn inv05_a_spare_that_cannot_be_made_before_the_lock_fails_no_send() {
    one_failure_fails_nothing::<Bitmap>(3); // chunks of 64, 128 and 256 slots
    one_failure_fails_nothing::<RbTree<u32>>(203);
}

#[test]
fn inv06_a_batch_without_memory_stops_at_the_message_that_needs_some() {
    let queue: Queue<u32> = Queue::new(100).unwrap();
    (0..62).for_each(|n| queue.send(n, 10).unwrap()); // a chunk has 64 places
    let mut batch: VecDeque<_> = [(1, 10), (2, 11), (3, 5_000), (4, 10)].into();
    FOR_EVER.set(true);
    LEFT.set(0);
    let refused = queue.send_batch(&mut batch);
    LEFT.set(-1);
    FOR_EVER.set(false);
    let refused = refused.unwrap_err();
    assert_eq!((refused.sent, refused.reason), (2, SendRefused::NoMemory));
    assert_eq!((batch, queue.len()), (VecDeque::from([(3, 5_000), (4, 10)]), 64));
    queue.validate();
}

/// All memory of a queue is freed.
#[test]
fn inv16_a_deep_queue_gives_all_its_memory_back() {
    fn check<L: Levels<Priority = u32>>() {
        let (got, back) = calls(|| {
            let queue: Queue<Box<u32>, L> = Builder::new(20_000).spare_nodes(10).build().unwrap();
            let mut number = numbers(9);
            (0..20_000).for_each(|n| queue.send(Box::new(n), number() % PRIORITIES).unwrap());
            drop(queue);
        });
        assert!(got > 20_000 && got == back, "{got} {back}");
    }
    check::<Bitmap>();
    check::<RbTree<u32>>();
}
