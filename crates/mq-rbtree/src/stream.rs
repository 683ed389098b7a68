//! A queue as a `Stream`.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::{FusedStream, Stream};

use offlock_sync::Waiter;

use crate::core::{Bitmap, Levels};
use crate::handles::Receiver;
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
    /// Waits only between a poll that was pending and the next message.
    waiter: Waiter<'q>,
    queue: &'q Queue<T, L>,
    ended: bool,
    /// Declared last: it is dropped after what borrows its queue.
    _owner: Option<Receiver<T, L>>,
}

impl<T, L: Levels> Queue<T, L> {
    /// Returns the messages as a `Stream`. Needs the feature `stream`.
    pub fn stream(&self) -> ReceiveStream<'_, T, L> {
        ReceiveStream { waiter: self.receivers.waiter(), queue: self, ended: false, _owner: None }
    }
}

impl<T, L: Levels> Receiver<T, L> {
    /// Returns the messages as a `Stream` that owns the receiver. Needs the feature `stream`.
    ///
    /// So the stream borrows nothing. It counts as a handle until it is dropped.
    pub fn into_stream(self) -> ReceiveStream<'static, T, L> {
        // SAFETY: the receiver keeps the queue alive and in its place. It is in the stream, and is dropped
        // after the waiter; no other reference leaves the stream.
        let queue: &'static Queue<T, L> = unsafe { &*std::ptr::from_ref(&*self) };
        ReceiveStream { _owner: Some(self), ..queue.stream() }
    }
}

impl<T, L: Levels> Stream for ReceiveStream<'_, T, L> {
    type Item = Received<T, L>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Received<T, L>>> {
        // SAFETY: the waiter is not moved out of the stream.
        let this = unsafe { self.get_unchecked_mut() };
        if this.ended {
            return Poll::Ready(None);
        }
        // SAFETY: the waiter is a field of a pinned stream.
        let waiter = unsafe { Pin::new_unchecked(&mut this.waiter) };
        let received = ready!(this.queue.poll_to_receive(waiter, cx)).ok();
        this.ended = received.is_none();
        Poll::Ready(received)
    }
}

impl<T, L: Levels> FusedStream for ReceiveStream<'_, T, L> {
    fn is_terminated(&self) -> bool {
        self.ended
    }
}

impl<T, L: Levels> fmt::Debug for ReceiveStream<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveStream").field("ended", &self.ended).finish_non_exhaustive()
    }
}
