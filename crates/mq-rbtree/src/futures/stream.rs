//! A queue as a `Stream`.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::{FusedStream, Stream};

use super::ReceiveFuture;
use crate::core::{Bitmap, Levels};
use crate::handles::{QueueRef, Receiver};
use crate::queue::{Queue, Received};

/// The messages of a queue as a `Stream`.
///
/// It comes from [`Queue::stream`] or [`Receiver::into_stream`]. It ends when
/// the queue is closed and empty. For each message it waits behind the receivers that wait already.
/// Dropping the stream loses no message.
///
/// ```
/// # use std::{future::poll_fn, future::Future, pin::{Pin, pin}, task::{Context, Waker}};
/// use futures_core::Stream;
///
/// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
/// sender.send("later", 1)?;
/// sender.send("now", 9)?;
/// drop(sender);
/// let mut stream = pin!(receiver.into_stream());
/// # let task = async {
/// // With the `futures` crate: `while let Some((message, priority)) = stream.next().await`
/// let mut messages = Vec::new();
/// while let Some((message, _)) = poll_fn(|cx| stream.as_mut().poll_next(cx)).await {
///     messages.push(message);
/// }
/// assert_eq!(messages, ["now", "later"]);
/// # };
/// # assert!(pin!(task).poll(&mut Context::from_waker(Waker::noop())).is_ready());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "streams do nothing unless polled"]
pub struct ReceiveStream<'q, T, L: Levels = Bitmap> {
    /// Between two messages it has not begun, and it is completed once the stream has ended.
    future: ReceiveFuture<'q, T, L>,
}

impl<T, L: Levels> Queue<T, L> {
    /// Returns the messages as a `Stream`. Needs the feature `stream`.
    pub fn stream(&self) -> ReceiveStream<'_, T, L> {
        ReceiveStream { future: self.receive_async() }
    }
}

impl<T, L: Levels> Receiver<T, L> {
    /// Returns the messages as a `Stream` that owns the receiver. Needs the feature `stream`.
    ///
    /// So the stream borrows nothing. It counts as a handle until it is dropped.
    pub fn into_stream(self) -> ReceiveStream<'static, T, L> {
        ReceiveStream { future: ReceiveFuture::new(QueueRef::Owned(self)) }
    }
}

impl<T, L: Levels> Stream for ReceiveStream<'_, T, L> {
    type Item = Received<T, L>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Received<T, L>>> {
        // SAFETY: the future is not moved out of the stream.
        let this = unsafe { self.get_unchecked_mut() };
        if this.future.completed {
            return Poll::Ready(None);
        }
        // SAFETY: the future is a field of a pinned stream.
        let future = unsafe { Pin::new_unchecked(&mut this.future) };
        let received = ready!(future.poll(cx)).ok();
        this.future.completed = received.is_none(); // the next receive waits behind the current waiters
        Poll::Ready(received)
    }
}

impl<T, L: Levels> FusedStream for ReceiveStream<'_, T, L> {
    fn is_terminated(&self) -> bool {
        self.future.completed
    }
}

impl<T, L: Levels> fmt::Debug for ReceiveStream<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = self.future.completed;
        f.debug_struct("ReceiveStream").field("ended", &ended).finish_non_exhaustive()
    }
}
