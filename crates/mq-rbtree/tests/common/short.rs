//! Memory that runs out: an allocator that refuses what it is told to, on the thread that tells it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Allocations that are refused from now on.
    static TO_REFUSE: Cell<usize> = const { Cell::new(0) };
}

struct Short;

// SAFETY: the system's allocator, which may refuse, as any may; nothing here unwinds or allocates.
unsafe impl GlobalAlloc for Short {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let left = TO_REFUSE.get();
        if left > 0 {
            TO_REFUSE.set(left - 1);
            return std::ptr::null_mut();
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
static ALLOCATOR: Short = Short;

/// Runs `f`, of which the first `count` allocations are refused. Returns how many were.
pub(crate) fn refused<R>(count: usize, f: impl FnOnce() -> R) -> (R, usize) {
    TO_REFUSE.set(count);
    let result = f();
    (result, count - TO_REFUSE.replace(0))
}
