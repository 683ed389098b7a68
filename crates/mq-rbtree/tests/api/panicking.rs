//! Helpers for tests of panics and wakers.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

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

/// A waker that runs a function when it is woken.
pub(crate) struct OnWake(pub(crate) Box<dyn Fn() + Send + Sync>);

impl Wake for OnWake {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

/// Returns a waker that panics when it is woken.
pub(crate) fn bomb() -> Waker {
    Arc::new(OnWake(Box::new(|| panic!("a waker")))).into()
}
