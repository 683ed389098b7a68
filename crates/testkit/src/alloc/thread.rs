//! Counts and refusals of each thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// Bytes that all threads allocated and did not free.
static BYTES: AtomicI64 = AtomicI64::new(0);

// Constant and without a destructor, so that the allocator may use them as long as a thread runs.
thread_local! {
    static CALLS: Cell<Calls> = const { Cell::new(Calls::NONE) };
    /// Bytes that this thread allocated minus those that it freed.
    static THREAD_BYTES: Cell<i64> = const { Cell::new(0) };
    /// The number of allocations that succeed before the first refusal.
    static ADMITTED: Cell<usize> = const { Cell::new(0) };
    /// The number of allocations that are refused then.
    static REFUSALS: Cell<usize> = const { Cell::new(0) };
    /// The bytes of the smallest allocation that may be refused.
    static LEAST: Cell<usize> = const { Cell::new(0) };
}

/// The number of calls of the allocator. A `realloc` is both an allocation and a release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Calls that allocate.
    pub allocated: u64,
    /// Calls that free.
    pub freed: u64,
}

impl Calls {
    /// No call.
    pub const NONE: Self = Self { allocated: 0, freed: 0 };

    /// All calls.
    pub fn total(self) -> u64 {
        self.allocated + self.freed
    }
}

/// The system's allocator. It counts the calls and bytes of each thread, and refuses the calling
/// thread's allocations inside of [`refuse_after`] and [`refuse_first`].
#[derive(Debug)]
pub struct ThreadAllocator {
    on_call: fn(Calls),
}

impl ThreadAllocator {
    /// An allocator that only counts and refuses.
    pub const fn new() -> Self {
        Self { on_call: |_| {} }
    }

    /// An allocator that calls `on_call` before each call is served, with the counts of this one
    /// call. `on_call` must not unwind. It may allocate if it stops its own recursion.
    pub const fn with_hook(on_call: fn(Calls)) -> Self {
        Self { on_call }
    }

    /// Counts an allocation, and returns whether it is admitted.
    fn admits(&self, allocated: usize) -> bool {
        self.count(Calls { allocated: 1, freed: 0 });
        let is_large = allocated >= LEAST.get();
        let admitted = !is_large || REFUSALS.get() == 0 || ADMITTED.get() > 0;
        if admitted {
            ADMITTED.set(ADMITTED.get().saturating_sub(is_large.into()));
            add_bytes(allocated as i64);
        } else if REFUSALS.get() != usize::MAX {
            REFUSALS.set(REFUSALS.get() - 1);
        }
        admitted
    }

    fn count(&self, call: Calls) {
        let before = CALLS.get();
        let (allocated, freed) = (before.allocated + call.allocated, before.freed + call.freed);
        CALLS.set(Calls { allocated, freed });
        (self.on_call)(call);
    }

    fn release(&self, bytes: usize) {
        self.count(Calls { allocated: 0, freed: 1 });
        add_bytes(-(bytes as i64));
    }
}

impl Default for ThreadAllocator {
    fn default() -> Self {
        Self::new()
    }
}

fn add_bytes(bytes: i64) {
    THREAD_BYTES.set(THREAD_BYTES.get() + bytes);
    // Ordering: Relaxed; a count, it publishes nothing.
    BYTES.fetch_add(bytes, Relaxed);
}

// SAFETY: every admitted call goes to the system's allocator as it came, and any allocator may
// refuse. Nothing here unwinds, and the counts are in thread-locals that need no allocation.
unsafe impl GlobalAlloc for ThreadAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !self.admits(layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: the caller of this function keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !self.admits(layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: the caller of this function keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        self.release(layout.size());
        // SAFETY: the caller of this function keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !self.admits(size) {
            return ptr::null_mut(); // the old memory stays allocated
        }
        self.release(layout.size());
        // SAFETY: the caller of this function keeps the contract of `realloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Runs `f`, and returns the calls of the allocator that this thread made meanwhile. They do not
/// include the drop of the result.
pub fn calls<R>(f: impl FnOnce() -> R) -> (R, Calls) {
    let before = CALLS.get();
    let result = f();
    let after = CALLS.get();
    let allocated = after.allocated - before.allocated;
    (result, Calls { allocated, freed: after.freed - before.freed })
}

/// Returns the bytes that this thread allocated minus those that it freed, since it began.
pub fn thread_bytes() -> i64 {
    THREAD_BYTES.get()
}

/// Returns the bytes that all threads allocated and did not free.
pub fn process_bytes() -> i64 {
    // Ordering: Relaxed; a caller that wants an exact number has joined the other threads.
    BYTES.load(Relaxed)
}

/// Runs `f`. Its first `admitted` allocations on this thread succeed; all later ones are refused.
pub fn refuse_after<R>(admitted: usize, f: impl FnOnce() -> R) -> R {
    refusing(admitted, usize::MAX, f).0
}

/// Returns how many allocations would still succeed, inside of [`refuse_after`].
pub fn admitted_left() -> usize {
    ADMITTED.get()
}

/// Calls `f` while its first allocation on this thread is refused, then its second, and so on until it succeeds.
/// A call that fails returns the value that it was given, for the next one. Calls `check` after each failure,
/// with the number of allocations that were admitted.
///
/// # Panics
///
/// Panics if `f` allocates nothing, or fails a hundred times.
pub fn until_admitted<V, R>(
    mut value: V,
    mut f: impl FnMut(V) -> Result<R, V>,
    mut check: impl FnMut(usize),
) -> R {
    for admitted in 0..100 {
        match refuse_after(admitted, || f(value)) {
            Err(back) => value = back,
            Ok(result) => {
                assert!(admitted > 0, "the call allocates nothing");
                return result;
            }
        }
        check(admitted);
    }
    panic!("refused for ever");
}

/// Runs `f`. Its first `count` allocations on this thread are refused. Returns how many it asked for
/// and did not get.
pub fn refuse_first<R>(count: usize, f: impl FnOnce() -> R) -> (R, usize) {
    let (result, left) = refusing(0, count, f);
    (result, count - left)
}

/// Runs `f`. Of its allocations of `least` bytes or more on this thread, the one behind the first `admitted` is refused.
/// Returns whether there was one.
pub fn refuse_large<R>(least: usize, admitted: usize, f: impl FnOnce() -> R) -> (R, bool) {
    LEAST.set(least);
    let (result, left) = refusing(admitted, 1, f);
    (result, left == 0)
}

/// Returns the refusals that are left as well.
fn refusing<R>(admitted: usize, refusals: usize, f: impl FnOnce() -> R) -> (R, usize) {
    /// Ends the refusals, after a panic too: its message is allocated.
    struct End;

    impl Drop for End {
        fn drop(&mut self) {
            REFUSALS.set(0);
            ADMITTED.set(0);
            LEAST.set(0);
        }
    }

    let _end = End;
    ADMITTED.set(admitted);
    REFUSALS.set(refusals);
    let result = f();
    (result, REFUSALS.get())
}
