//! Calls of foreign code (devices, verifiers, callbacks, wakers, and what these drop) that may
//! panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use offlock_sync::panics::drop_payload;

/// A contained call has panicked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panicked;

/// Calls `f` and keeps a panic from unwinding into the caller.
///
/// The payload's drop is foreign code too: a panic of it is caught as well, and its payload leaks.
pub(crate) fn contain<R>(f: impl FnOnce() -> R) -> Result<R, Panicked> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        drop_payload(payload);
        Panicked
    })
}

/// Calls `job` on a thread of the cache, and drops a panic of it, which must not end the thread.
///
/// `job` is code of the cache that may drop a device or its last handle. A model does not catch the
/// panic, because the checker reports an error by a panic.
pub(crate) fn contain_job(job: impl FnOnce()) {
    if cfg!(offlock_model) {
        job();
    } else {
        let _ = contain(job);
    }
}
