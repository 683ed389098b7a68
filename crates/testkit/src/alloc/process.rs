//! Counts of all threads, behind a switch.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

static ON: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

/// The system's allocator. It counts the calls of all threads while [`counted`] runs.
#[derive(Debug)]
pub struct CountingAllocator;

// SAFETY: every call goes to the system's allocator as it came; the counts touch no other memory.
unsafe impl GlobalAlloc for CountingAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, layout.size() as i64);
        // SAFETY: the caller of this function keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(1, layout.size() as i64);
        // SAFETY: the caller of this function keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(0, -(layout.size() as i64));
        // SAFETY: the caller of this function keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(1, size as i64 - layout.size() as i64);
        // SAFETY: the caller of this function keeps the contract of `realloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[inline(always)]
fn count(allocations: u64, bytes: i64) {
    // Ordering: Relaxed; the threads that are counted are joined before the sums are read.
    if ON.load(Relaxed) {
        ALLOCATIONS.fetch_add(allocations, Relaxed);
        BYTES.fetch_add(bytes, Relaxed);
    }
}

/// The allocations of all threads while [`counted`] ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Calls that allocate: `alloc`, `alloc_zeroed` and `realloc`.
    pub allocations: u64,
    /// Bytes allocated and not freed, by the layouts that were asked for. Negative if more were
    /// freed.
    pub bytes: i64,
}

/// Runs `f`, and counts the allocations of all threads meanwhile. Not reentrant: one caller at a
/// time.
pub fn counted<R>(f: impl FnOnce() -> R) -> (R, Counted) {
    // Ordering: Relaxed, here and below; see `count`.
    ALLOCATIONS.store(0, Relaxed);
    BYTES.store(0, Relaxed);
    ON.store(true, Relaxed);
    let result = f();
    ON.store(false, Relaxed);
    (result, Counted { allocations: ALLOCATIONS.load(Relaxed), bytes: BYTES.load(Relaxed) })
}
