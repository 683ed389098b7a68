//! Calls of user code that may panic: wakers, and the drops of contexts.
//!
//! The panic hook has reported a panic when it is caught here.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use percpu::panics::drop_payload;

/// The payload of a panic.
pub(super) type Payload = Box<dyn Any + Send>;

/// Calls user code, and returns its panic as an error.
pub(super) fn caught(f: impl FnOnce()) -> Result<(), Payload> {
    catch_unwind(AssertUnwindSafe(f))
}

/// Calls user code, and drops its panic.
pub(super) fn contained(f: impl FnOnce()) {
    if let Err(payload) = caught(f) {
        drop_payload(payload);
    }
}
