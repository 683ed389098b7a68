//! The payload of a panic that goes no further.

use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Drops the payload of a caught panic, and never panics.
///
/// The drop of the payload is code of the user and may panic too. The payload of that panic is
/// leaked, because its drop may panic again.
pub fn drop_payload(payload: Box<dyn Any + Send>) {
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(another);
    }
}
