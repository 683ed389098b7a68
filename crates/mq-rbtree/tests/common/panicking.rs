//! Helpers for tests of panics.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Waker};

/// Polls a future once, with this waker.
pub(crate) fn poll<F: Future + ?Sized>(
    future: &mut Pin<Box<F>>,
    waker: Waker,
) -> std::task::Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(&waker))
}

/// Returns whether `f` panics.
pub(crate) fn panics<R>(f: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(|| drop(f()))).is_err()
}
