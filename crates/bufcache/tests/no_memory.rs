//! A cache that finds no memory for one of its parts is refused, and nothing aborts.
#![cfg(not(offlock_model))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

use bufcache::{BuildError, Cache, Eviction};

/// Allocations of so many bytes count as large.
const LARGE: usize = 128 << 10;

thread_local! {
    /// How many large allocations of this thread succeed before one fails.
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

struct Failing;

// SAFETY: the system's allocator, or null; nothing here unwinds or allocates.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE {
            match LEFT.get() {
                0 => {
                    LEFT.set(u64::MAX);
                    return ptr::null_mut();
                }
                left => LEFT.set(left - 1),
            }
        }
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are handed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

#[test]
fn a_cache_without_memory_for_one_of_its_parts_is_refused() {
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::Clock] {
        let build = || Cache::builder(64 << 20).block_size(512).eviction(eviction).build();
        let mut failed = 0;
        loop {
            LEFT.set(failed);
            let built = build();
            let is_left = LEFT.replace(u64::MAX) <= u64::MAX / 2;
            match built {
                Ok(_) => {
                    assert!(is_left, "an allocation failed, and the cache was built");
                    break;
                }
                Err(error) => assert!(matches!(error, BuildError::NoMemory), "{error}"),
            }
            failed += 1;
        }
        assert!(failed >= 4, "{failed} large allocations: what is tested?");
    }
}
