//! An allocator that counts, each thread for itself.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Without a destructor, so that it may be used as long as the thread allocates.
    static CALLS: Cell<Calls> = const { Cell::new(Calls { allocated: 0, freed: 0 }) };
}

/// How often memory was asked for and given back. A change of size is both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Calls {
    pub(super) allocated: u64,
    pub(super) freed: u64,
}

impl Calls {
    pub(super) const NONE: Self = Self { allocated: 0, freed: 0 };
}

/// What this thread does meanwhile.
pub(super) fn calls<R>(run: impl FnOnce() -> R) -> (R, Calls) {
    let before = CALLS.get();
    let result = run();
    let Calls { allocated, freed } = CALLS.get();
    (result, Calls { allocated: allocated - before.allocated, freed: freed - before.freed })
}

fn count(allocated: u64, freed: u64) {
    let before = CALLS.get();
    let freed = before.freed + freed;
    CALLS.set(Calls { allocated: before.allocated + allocated, freed });
}

struct Counting;

// SAFETY: the system's allocator, and counts that neither allocate nor unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, 0);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(1, 0);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(0, 1);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(1, 1);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
