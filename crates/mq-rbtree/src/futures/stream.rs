//! A queue behind the traits that libraries for tasks have in common.

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

/// Messages as a `Stream`: [`Receiver::into_stream`], [`Queue::stream`].
///
/// Ends when the queue is closed and empty. Dropping it loses no message. It waits for each message
/// behind the receivers that wait by then.
#[must_use = "streams do nothing unless polled"]
pub struct ReceiveStream<'q, T, L: Levels = Bitmap> {
    future: ReceiveFuture<'q, T, L>,
    urgency: u8,
    ended: bool,
}

/// A `Sink` for messages with their priorities: [`Sender::into_sink`], [`Queue::sink`].
///
/// It keeps one message at most. That is on its way when it is flushed, or asked whether it is ready
/// for another: then it waits while there is no room. What is refused comes back in the error, at the
/// flush; a message that can never be sent at once. Closing flushes: the queue closes with the last
/// sender, as ever. Dropping it drops the message that it kept.
#[must_use = "sinks do nothing unless polled"]
pub struct SendSink<'q, T, L: Levels = Bitmap> {
    future: SendFuture<'q, T, L>,
    urgency: u8,
}

impl<T, L: Levels> Queue<T, L> {
    /// Its messages as a `Stream`. With the feature `futures`.
    pub fn stream(&self) -> ReceiveStream<'_, T, L> {
        ReceiveStream::new(ReceiveFuture::new(self))
    }

    /// A `Sink` that sends to it. With the feature `futures`.
    pub fn sink(&self) -> SendSink<'_, T, L> {
        SendSink::new(QueueRef::Borrowed(self))
    }
}

impl<T, L: Levels> Receiver<T, L> {
    /// The messages as a `Stream`. With the feature `futures`.
    pub fn stream(&self) -> ReceiveStream<'_, T, L> {
        ReceiveStream::new(self.receive_async())
    }

    /// The same with the receiver in the stream, which so depends on no reference, and counts as a handle
    /// until it is dropped. With the feature `futures`.
    pub fn into_stream(self) -> ReceiveStream<'static, T, L> {
        ReceiveStream::new(ReceiveFuture::owning(self))
    }
}

impl<T, L: Levels> Sender<T, L> {
    /// A `Sink` that sends. With the feature `futures`.
    pub fn sink(&self) -> SendSink<'_, T, L> {
        SendSink::new(QueueRef::Borrowed(self.queue()))
    }

    /// The same with the sender in the sink, which so depends on no reference, and counts as a handle
    /// until it is dropped. With the feature `futures`.
    pub fn into_sink(self) -> SendSink<'static, T, L> {
        SendSink::new(QueueRef::Owned(self))
    }
}

impl<'q, T, L: Levels> ReceiveStream<'q, T, L> {
    fn new(future: ReceiveFuture<'q, T, L>) -> Self {
        Self { future, urgency: 0, ended: false }
    }

    /// The same, with this urgency among those that wait: see [`Wait::urgency`](crate::Wait::urgency).
    pub fn urgency(self, urgency: u8) -> Self {
        Self { future: self.future.urgency(urgency), urgency, ended: self.ended }
    }
}

impl<'q, T, L: Levels> SendSink<'q, T, L> {
    fn new(queue: QueueRef<'q, T, L, Sender<T, L>>) -> Self {
        Self { future: SendFuture::without_message(queue), urgency: 0 }
    }

    /// The same, with this urgency among those that wait: see [`Wait::urgency`](crate::Wait::urgency).
    pub fn urgency(self, urgency: u8) -> Self {
        Self { future: self.future, urgency }
    }

    fn future(self: Pin<&mut Self>) -> Pin<&mut SendFuture<'q, T, L>> {
        // SAFETY: pinned as a part of what is pinned: it is not moved, and dropped in its place.
        unsafe { self.map_unchecked_mut(|this| &mut this.future) }
    }
}

impl<T, L: Levels> Stream for ReceiveStream<'_, T, L> {
    type Item = Received<T, L>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Received<T, L>>> {
        // SAFETY: the future is not moved.
        let this = unsafe { self.get_unchecked_mut() };
        if this.ended {
            return Poll::Ready(None);
        }
        // SAFETY: pinned as a part of what is pinned.
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
    /// Panics if it was not ready: it keeps a message still.
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
