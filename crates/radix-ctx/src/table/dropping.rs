//! The tables whose contexts the calling thread is dropping, because it reclaims or put a last reference.
//!
//! Such a drop may call the table, and must not wait there for what comes after it. A list through the
//! thread's own stack records it.

use std::cell::Cell;
use std::ptr;

use percpu::sync::thread_local;

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
thread_local! {
    static INNERMOST: Cell<*const Frame> = const { Cell::new(ptr::null()) };
}

#[cfg(any(offlock_loom, offlock_shuttle))]
thread_local! {
    static INNERMOST: Cell<*const Frame> = Cell::new(ptr::null());
}

/// A drop on this thread's stack.
struct Frame {
    /// The address of a core.
    of: *const (),
    outer: *const Frame,
}

/// Puts the outer frame back, however `dropping` ends.
struct Leave(*const Frame);

impl Drop for Leave {
    fn drop(&mut self) {
        INNERMOST.with(|innermost| innermost.set(self.0));
    }
}

/// Runs `f`, which drops contexts of `of`.
pub(super) fn dropping<R>(of: *const (), f: impl FnOnce() -> R) -> R {
    let outer = INNERMOST.with(Cell::get);
    let frame = Frame { of, outer };
    let _leave = Leave(outer);
    INNERMOST.with(|innermost| innermost.set(&raw const frame));
    f()
}

/// Whether this thread is dropping a context of `of`.
pub(super) fn is_dropping(of: *const ()) -> bool {
    let mut at = INNERMOST.with(Cell::get);
    // SAFETY: null, or a frame of this thread's stack that `dropping` has not left.
    while let Some(frame) = unsafe { at.as_ref() } {
        if frame.of == of {
            return true;
        }
        at = frame.outer;
    }
    false
}
