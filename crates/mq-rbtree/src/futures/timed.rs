//! A future of the queue with a deadline, which a timer of the runtime ends.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// An asynchronous send or receive that ends when a timer does.
///
/// It comes from [`SendFuture::until`](crate::SendFuture::until) or
/// [`ReceiveFuture::until`](crate::ReceiveFuture::until). The queue has no clock of its own
/// for tasks: the timer is any future, such as `tokio::time::sleep`. When it is ready, the operation
/// completes if it can, and otherwise returns `Timeout`; a send gives its message back.
///
/// ```
/// # use std::{future::{Future, ready}, pin::pin, task::{Context, Poll, Waker}};
/// use mq_rbtree::{Queue, ReceiveError, SendRefused};
///
/// # let mut cx = Context::from_waker(Waker::noop());
/// # let timer = || ready(()); // one that is over
/// let queue: Queue<&str> = Queue::new(1)?;
/// let receive = pin!(queue.receive_async().until(timer()));
/// assert_eq!(receive.poll(&mut cx), Poll::Ready(Err(ReceiveError::Timeout)));
///
/// queue.send("first", 1)?;
/// let send = pin!(queue.send_async("second", 1).until(timer()));
/// let Poll::Ready(Err(refused)) = send.poll(&mut cx) else { panic!() };
/// assert_eq!((refused.value, refused.reason), ("second", SendRefused::Timeout));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "futures do nothing unless polled"]
pub struct Timed<F, S> {
    pub(super) operation: F,
    pub(super) timer: S,
}

/// An operation that can be ended before it is completed.
pub(super) trait Expire: Future {
    /// Ends the operation, which is pending: completes it if that is possible now.
    fn expire(self: Pin<&mut Self>) -> Self::Output;
}

impl<F: Expire, S: Future> Future for Timed<F, S> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // SAFETY: neither field is moved: both are pinned again below.
        let Self { operation, timer } = unsafe { self.get_unchecked_mut() };
        // SAFETY: the field of a pinned future, which is never moved.
        let mut operation = unsafe { Pin::new_unchecked(operation) };
        // SAFETY: the field of a pinned future, which is never moved.
        let timer = unsafe { Pin::new_unchecked(timer) };
        if let ready @ Poll::Ready(_) = operation.as_mut().poll(cx) {
            return ready;
        }
        timer.poll(cx).map(|_| operation.expire())
    }
}

impl<F, S> fmt::Debug for Timed<F, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timed").finish_non_exhaustive()
    }
}
