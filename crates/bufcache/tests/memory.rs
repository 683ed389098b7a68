//! When memory is asked for, and that there may be none: an allocator that counts and refuses.
#![cfg(not(offlock_model))]

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bufcache::{BuildError, Cache, Eviction, MemoryDevice};
use testkit::alloc::{ThreadAllocator, refuse_large, thread_bytes};

#[global_allocator]
static ALLOCATOR: ThreadAllocator = ThreadAllocator::new();

/// Calls of the allocator, of every kind, that this thread makes in `f`.
fn calls(f: impl FnOnce()) -> u64 {
    testkit::alloc::calls(f).1.total()
}

#[test]
fn inv01_hits_and_steady_misses_allocate_nothing() {
    assert!(calls(|| drop(std::hint::black_box(Box::new(1)))) == 2, "it counts");
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::Clock] {
        let cache = Cache::builder(160 * 512).block_size(512).eviction(eviction);
        let cache = cache.build().unwrap();
        let disk = cache.attach(MemoryDevice::new(vec![3; 512 * 1000])).unwrap();
        let get = |block: u64| assert_eq!(disk.get(block).unwrap()[0], 3);
        // Until it is full, and this thread has its slots and counters.
        (0..200).for_each(get);
        let before = cache.stats();
        assert_eq!(calls(|| (200..1000).chain(0..1000).for_each(get)), 0, "misses of {eviction:?}");
        let after = cache.stats();
        let (missed, evicted) = (after.misses - before.misses, after.evictions - before.evictions);
        assert!(evicted.abs_diff(missed) <= 8, "a batch at a time: {missed} and {evicted}");
        assert!(after.misses - before.misses > 1000, "{after}");

        get(7);
        let before = cache.stats();
        assert_eq!(calls(|| (0..1000).for_each(|_| get(7))), 0, "hits of {eviction:?}");
        assert_eq!(cache.stats().misses, before.misses);

        let invalidations = || {
            disk.invalidate(7).unwrap();
            get(7);
        };
        assert_eq!(calls(|| (0..100).for_each(|_| invalidations())), 0);
        let pinned = || drop(disk.get(7).unwrap().pin().unwrap());
        assert_eq!(calls(|| (0..100).for_each(|_| pinned())), 0);
    }
}

#[test]
fn inv01_a_miss_that_writes_dirty_buffers_allocates_nothing() {
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::Clock] {
        let cache = Cache::builder(160 * 512).block_size(512).eviction(eviction);
        let cache = cache.dirty_limits(100, 100).write_back_after(Duration::from_secs(3600));
        let cache = cache.build().unwrap();
        let disk = cache.attach(MemoryDevice::new(vec![3; 512 * 4000])).unwrap();
        let dirty = |block: u64| disk.get_mut(block).unwrap().fill(5);
        (0..200).for_each(dirty);
        let before = cache.stats();
        assert_eq!(calls(|| (200..4000).for_each(dirty)), 0, "{eviction:?}");
        let after = cache.stats();
        assert!(after.evictions > before.evictions + 3000, "{after}");
    }
}

/// A thread's first wait for a lock allocates nothing: here for that of the unsynced sectors, under
/// which a zero merges thousands of ranges.
#[test]
fn inv01_a_miss_that_waits_for_a_lock_allocates_nothing() {
    const MISSED: u64 = 200;
    const ZEROED: u64 = 30_000;
    let cache = Cache::builder(160 * 512).block_size(512);
    let cache = cache.dirty_limits(100, 100).write_back_after(Duration::from_secs(3600));
    let cache = cache.build().unwrap();
    let len = 512 * (MISSED + ZEROED) as usize;
    for _ in 0..2 {
        let disk = cache.attach(MemoryDevice::new(vec![3; len])).unwrap();
        disk.zero(0..MISSED).unwrap(); // these are unsynced already, as one range
        let zeroed = MISSED + 1..MISSED + ZEROED;
        zeroed.clone().step_by(2).for_each(|block| disk.zero(block..block + 1).unwrap());
        let dirty = |block: u64| disk.create(block).unwrap().fill(5);
        let (start, zeroes) = (Barrier::new(2), AtomicBool::new(true));
        thread::scope(|scope| {
            scope.spawn(|| {
                let missed = || (0..MISSED).for_each(dirty);
                missed(); // this thread has its slots
                start.wait();
                while zeroes.load(Ordering::Relaxed) {
                    assert_eq!(calls(missed), 0);
                }
            });
            start.wait();
            disk.zero(zeroed).unwrap();
            zeroes.store(false, Ordering::Relaxed);
        });
    }
}

/// What `Eviction::Adaptive` says of its memory.
#[test]
fn the_shadows_take_so_much() {
    let bytes = |blocks: usize, eviction| {
        let before = thread_bytes();
        let cache = Cache::builder(blocks * 512).block_size(512).eviction(eviction).build();
        let after = thread_bytes();
        drop(cache.unwrap());
        after - before
    };
    bytes(1, Eviction::A2); // the first cache of a thread has memory of the thread
    let extra = |blocks| bytes(blocks, Eviction::Adaptive) - bytes(blocks, Eviction::A2);
    assert_eq!([1, 16, 127].map(extra), [0; 3], "none");
    for (blocks, kib) in [(128, 24), (512, 64), (2048, 180), (1 << 20, 180)] {
        let extra = extra(blocks);
        assert!((kib * 512..=kib * 1024).contains(&extra), "{blocks} blocks: {extra} bytes");
    }
}

/// Nothing aborts.
#[test]
fn a_cache_without_memory_for_one_of_its_parts_is_refused() {
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::Clock] {
        let build = || Cache::builder(64 << 20).block_size(512).eviction(eviction).build();
        let mut admitted = 0;
        while let (built, true) = refuse_large(128 << 10, admitted, build) {
            assert!(matches!(built, Err(BuildError::NoMemory)), "part {admitted}");
            admitted += 1;
        }
        assert!(admitted >= 4, "{admitted} large allocations: what is tested?");
    }
}
