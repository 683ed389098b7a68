//! Code of others' that may panic: wakers, and the drops of contexts.
//!
//! A panic is reported when it begins, so it may end here.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use percpu::panics::drop_payload;

/// What a panic carries.
pub(super) type Payload = Box<dyn Any + Send>;

/// Runs code of others', and catches its panic.
pub(super) fn caught(f: impl FnOnce()) -> Result<(), Payload> {
    catch_unwind(AssertUnwindSafe(f))
}

/// Runs code of others', whose panic goes no further.
pub(super) fn contained(f: impl FnOnce()) {
    if let Err(payload) = caught(f) {
        drop_payload(payload);
    }
}
