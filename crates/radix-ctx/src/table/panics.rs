//! Code of others' that may panic: wakers, and the drops of contexts.
//!
//! A panic is reported when it begins, so it may end here. What it carries is others' too, and its
//! drop may panic in turn: what that carries is let go of.

use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a panic carries.
pub(super) type Payload = Box<dyn Any + Send>;

/// Runs code of others', and catches its panic.
pub(super) fn caught(f: impl FnOnce()) -> Result<(), Payload> {
    catch_unwind(AssertUnwindSafe(f))
}

/// Runs code of others', whose panic goes no further.
pub(super) fn contained(f: impl FnOnce()) {
    if let Err(payload) = caught(f) {
        discard(payload);
    }
}

/// Drops what a panic carried.
pub(super) fn discard(payload: Payload) {
    if let Err(another) = caught(|| drop(payload)) {
        mem::forget(another);
    }
}
