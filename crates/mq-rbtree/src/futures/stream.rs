//! A queue as a `Stream` and as a `Sink`.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::{FusedStream, Stream};
use futures_sink::Sink;

use super::receive::ReceiveFuture;
use super::send::SendFuture;
use crate::core::{Bitmap, Levels};
use crate::error::SendError;
use crate::handles::{QueueRef, Receiver, Sender};
use crate::queue::{Queue, Received};

/// The messages of a queue as a `Stream`.
///
/// It comes from [`Receiver::stream`], [`Receiver::into_stream`] or [`Queue::stream`]. It ends when
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
    future: ReceiveFuture<'q, T, L>,
    urgency: u8,
    ended: bool,
}

/// A `Sink` that sends messages with their priorities to a queue.
///
/// It comes from [`Sender::sink`], [`Sender::into_sink`] or [`Queue::sink`]. It holds at most one
/// message. `poll_flush` and `poll_ready` send that message, and wait while there is no room. A
/// refused message comes back in their error; a message that can never be sent, in the error of
/// `start_send`. `poll_close` flushes; the queue closes with its last sender, as ever. Dropping the
/// sink drops the message that it holds.
///
/// ```
/// # use std::{future::poll_fn, future::Future, pin::{Pin, pin}, task::{Context, Waker}};
/// use futures_sink::Sink;
///
/// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
/// let mut sink = pin!(sender.into_sink());
/// # let task = async {
/// // With the `futures` crate: `sink.send(("a message", 7)).await?`
/// poll_fn(|cx| sink.as_mut().poll_ready(cx)).await?;
/// sink.as_mut().start_send(("a message", 7))?;
/// poll_fn(|cx| sink.as_mut().poll_flush(cx)).await?;
/// # Ok::<(), mq_rbtree::SendError<&str>>(())
/// # };
/// # assert!(pin!(task).poll(&mut Context::from_waker(Waker::noop())).is_ready());
/// assert_eq!(receiver.receive()?, ("a message", 7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "sinks do nothing unless polled"]
pub struct SendSink<'q, T, L: Levels = Bitmap> {
    future: SendFuture<'q, T, L>,
    urgency: u8,
}

impl<T, L: Levels> Queue<T, L> {
    /// Returns the messages as a `Stream`. Needs the feature `stream`.
    pub fn stream(&self) -> ReceiveStream<'_, T, L> {
        ReceiveStream::new(self.receive_async())
    }

    /// Returns a `Sink` that sends to the queue. Needs the feature `stream`.
    pub fn sink(&self) -> SendSink<'_, T, L> {
        SendSink::new(QueueRef::Borrowed(self))
    }
}

impl<T, L: Levels> Receiver<T, L> {
    /// Returns the messages as a `Stream`. Needs the feature `stream`.
    pub fn stream(&self) -> ReceiveStream<'_, T, L> {
        ReceiveStream::new(self.receive_async())
    }

    /// Returns the messages as a `Stream` that owns the receiver. Needs the feature `stream`.
    ///
    /// So the stream borrows nothing. It counts as a handle until it is dropped.
    pub fn into_stream(self) -> ReceiveStream<'static, T, L> {
        ReceiveStream::new(self.into_receive_async())
    }
}

impl<T, L: Levels> Sender<T, L> {
    /// Returns a `Sink` that sends to the queue. Needs the feature `stream`.
    pub fn sink(&self) -> SendSink<'_, T, L> {
        SendSink::new(QueueRef::Borrowed(self.queue()))
    }

    /// Returns a `Sink` that owns the sender. Needs the feature `stream`.
    ///
    /// So the sink borrows nothing. It counts as a handle until it is dropped.
    pub fn into_sink(self) -> SendSink<'static, T, L> {
        SendSink::new(QueueRef::Owned(self))
    }
}

impl<'q, T, L: Levels> ReceiveStream<'q, T, L> {
    fn new(future: ReceiveFuture<'q, T, L>) -> Self {
        Self { future, urgency: 0, ended: false }
    }

    /// Sets the urgency of its waits: see [`Wait::urgency`](crate::Wait::urgency). Call it before
    /// the first poll.
    pub fn urgency(self, urgency: u8) -> Self {
        Self { future: self.future.urgency(urgency), urgency, ended: self.ended }
    }
}

impl<'q, T, L: Levels> SendSink<'q, T, L> {
    fn new(queue: QueueRef<'q, T, L, Sender<T, L>>) -> Self {
        Self { future: SendFuture::without_message(queue), urgency: 0 }
    }

    /// Sets the urgency of its waits: see [`Wait::urgency`](crate::Wait::urgency). It counts from
    /// the next message on.
    pub fn urgency(self, urgency: u8) -> Self {
        Self { future: self.future, urgency }
    }

    fn future(self: Pin<&mut Self>) -> Pin<&mut SendFuture<'q, T, L>> {
        // SAFETY: the future is a field of a pinned sink: it is not moved, and is dropped in its
        // place.
        unsafe { self.map_unchecked_mut(|this| &mut this.future) }
    }
}

impl<T, L: Levels> Stream for ReceiveStream<'_, T, L> {
    type Item = Received<T, L>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Received<T, L>>> {
        // SAFETY: the future is not moved out of the stream.
        let this = unsafe { self.get_unchecked_mut() };
        if this.ended {
            return Poll::Ready(None);
        }
        // SAFETY: the future is a field of a pinned stream.
        let mut future = unsafe { Pin::new_unchecked(&mut this.future) };
        match ready!(future.as_mut().poll(cx)) {
            Ok(message) => {
                future.restart(this.urgency);
                Poll::Ready(Some(message))
            }
            Err(_) => {
                this.ended = true;
                Poll::Ready(None)
            }
        }
    }
}

impl<T, L: Levels> FusedStream for ReceiveStream<'_, T, L> {
    fn is_terminated(&self) -> bool {
        self.ended
    }
}

impl<T, L: Levels> Sink<Received<T, L>> for SendSink<'_, T, L> {
    type Error = SendError<T>;

    fn poll_ready(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError<T>>> {
        self.poll_flush(cx)
    }

    /// # Panics
    ///
    /// Panics if the sink is not ready: it still holds a message.
    fn start_send(
        self: Pin<&mut Self>,
        (value, priority): Received<T, L>,
    ) -> Result<(), SendError<T>> {
        let urgency = self.urgency;
        self.future().restart(value, priority, urgency)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError<T>>> {
        let future = self.future();
        if future.has_message() { future.poll(cx) } else { Poll::Ready(Ok(())) }
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError<T>>> {
        self.poll_flush(cx)
    }
}

impl<T, L: Levels> fmt::Debug for ReceiveStream<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveStream").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl<T, L: Levels> fmt::Debug for SendSink<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keeps = self.future.has_message();
        f.debug_struct("SendSink").field("keeps_a_message", &keeps).finish_non_exhaustive()
    }
}
