//! Calls of user code: the drops of contexts, and wakers.
//!
//! The drop of a context may call its table, and must not wait there for the end of that same drop. Each
//! call of [`dropping`] links a frame on the thread's stack into a list of the thread.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::{ptr, thread};

use offlock_sync::const_thread_local;
use offlock_sync::panics::drop_payload;

/// The first panic of several calls, each of which must happen whatever the others do.
#[derive(Default)]
pub(super) struct FirstPanic(Option<Box<dyn Any + Send>>);

impl FirstPanic {
    /// Calls user code.
    #[inline]
    pub(super) fn call(&mut self, f: impl FnOnce()) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(f)) {
            if self.0.is_none() {
                self.0 = Some(payload);
            } else {
                drop_payload(payload);
            }
        }
    }

    /// Goes on with the panic, if there was one. The caller has nothing left to do. If the thread already
    /// unwinds for another panic, drops this one: two would abort the process.
    pub(super) fn resume(self) {
        match self.0 {
            Some(payload) if thread::panicking() => drop_payload(payload),
            Some(payload) => resume_unwind(payload),
            None => {}
        }
    }
}

const_thread_local! {
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
