//! The tables whose contexts the calling thread is dropping.
//!
//! The drop of a context may call its table, and must not wait there for the end of that same drop. Each
//! call of [`dropping`] links a frame on the thread's stack into a list of the thread.

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
    /// The address of the core.
    of: *const (),
    outer: *const Frame,
}

/// Restores the outer frame when `dropping` returns or unwinds.
struct Leave(*const Frame);

impl Drop for Leave {
    fn drop(&mut self) {
        INNERMOST.with(|innermost| innermost.set(self.0));
    }
}

/// Calls `f`, which drops contexts of the core at `of`.
pub(super) fn dropping<R>(of: *const (), f: impl FnOnce() -> R) -> R {
    let outer = INNERMOST.with(Cell::get);
    let frame = Frame { of, outer };
    let _leave = Leave(outer);
    INNERMOST.with(|innermost| innermost.set(&raw const frame));
    f()
}

/// Returns whether the calling thread is dropping a context of the core at `of`.
pub(super) fn is_dropping(of: *const ()) -> bool {
    let mut at = INNERMOST.with(Cell::get);
    // SAFETY: null, or a frame on this thread's stack of a call of `dropping` that has not returned.
    while let Some(frame) = unsafe { at.as_ref() } {
        if frame.of == of {
            return true;
        }
        at = frame.outer;
    }
    false
}
