//! When memory is asked for: an allocator that counts.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use bufcache::{Cache, Eviction, MemoryDevice};

thread_local! {
    /// Calls of this thread, of every kind.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator; nothing here unwinds or allocates.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn calls(f: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    f();
    CALLS.get() - before
}

#[test]
fn inv01_hits_and_steady_misses_allocate_nothing() {
    assert!(calls(|| drop(std::hint::black_box(Box::new(1)))) == 2, "it counts");
    for eviction in [Eviction::A2, Eviction::Clock] {
        let cache = Cache::builder(64 * 512).block_sizes(512, 512).eviction(eviction);
        let cache = cache.build().unwrap();
        let disk = cache.attach(MemoryDevice::new(vec![3; 512 * 1000]), 512).unwrap();
        let get = |block: u64| assert_eq!(disk.get(block).unwrap()[0], 3);
        // Until it is full, and this thread has its slots and counters.
        (0..200).for_each(get);
        let before = cache.stats().unwrap();
        assert_eq!(calls(|| (200..1000).chain(0..1000).for_each(get)), 0, "misses of {eviction:?}");
        let after = cache.stats().unwrap();
        assert_eq!(after.misses - before.misses, after.evictions - before.evictions);
        assert!(after.misses - before.misses > 1000, "{after}");

        get(7);
        let before = cache.stats().unwrap();
        assert_eq!(calls(|| (0..1000).for_each(|_| get(7))), 0, "hits of {eviction:?}");
        assert_eq!(cache.stats().unwrap().misses, before.misses);

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
    for eviction in [Eviction::A2, Eviction::Clock] {
        let cache = Cache::builder(64 * 512).block_sizes(512, 512).eviction(eviction);
        let cache = cache.dirty_limits(100, 100).write_back_after(Duration::from_secs(3600));
        let cache = cache.build().unwrap();
        let disk = cache.attach(MemoryDevice::new(vec![3; 512 * 4000]), 512).unwrap();
        let dirty = |block: u64| disk.get_mut(block).unwrap().fill(5);
        (0..200).for_each(dirty);
        let before = cache.stats().unwrap();
        assert_eq!(calls(|| (200..4000).for_each(dirty)), 0, "{eviction:?}");
        let after = cache.stats().unwrap();
        assert!(after.evictions > before.evictions + 3000, "{after}");
    }
}
