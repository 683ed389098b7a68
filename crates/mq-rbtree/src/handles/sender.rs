//! What a sender does.

use std::collections::VecDeque;

use super::Sender;
#[cfg(feature = "futures")]
use super::Way;
use crate::core::Levels;
use crate::deadline::Wait;
use crate::error::{BatchError, SendError};
use crate::queue::{Received, SendFuture};

impl<T, L: Levels> Sender<T, L> {
    /// Sends a message. Waits while there is no room.
    ///
    /// # Errors
    ///
    /// [`SendError`] with the message.
    #[inline]
    pub fn send(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        self.shared.queue.send(value, priority)
    }

    /// Sends a message if there is room now.
    ///
    /// # Errors
    ///
    /// [`SendError`] with the message.
    #[inline]
    pub fn try_send(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        self.shared.queue.try_send(value, priority)
    }

    /// Sends a message. Waits as `wait` says while there is no room.
    ///
    /// # Errors
    ///
    /// [`SendError`] with the message.
    #[inline]
    pub fn send_with(
        &self,
        value: T,
        priority: L::Priority,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        self.shared.queue.send_with(value, priority, wait)
    }

    /// Sends a message, asynchronously: [`Queue::send_async`](crate::Queue::send_async).
    pub fn send_async(&self, value: T, priority: L::Priority) -> SendFuture<'_, T, L> {
        self.shared.queue.send_async(value, priority)
    }

    /// The same with the sender in the future, which so depends on no reference, and counts as a handle
    /// until it is dropped.
    ///
    /// ```
    /// # use std::{future::Future, pin::Pin};
    /// # let mut spawned = Vec::new();
    /// # let mut spawn = |task: Pin<Box<dyn Future<Output = _> + Send + 'static>>| spawned.push(task);
    /// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
    /// spawn(Box::pin(sender.clone().into_send_async("a message", 7)));
    /// # let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    /// # assert!(spawned[0].as_mut().poll(&mut cx).is_ready());
    /// # assert_eq!(receiver.try_receive(), Ok(("a message", 7)));
    /// # Ok::<(), mq_rbtree::BuildError>(())
    /// ```
    ///
    /// One that borrows its sender is not `'static`:
    ///
    /// ```compile_fail,E0597
    /// fn spawn(task: impl Future<Output = Result<(), mq_rbtree::SendError<u8>>> + Send + 'static) {}
    /// # use std::future::Future;
    /// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
    /// spawn(sender.send_async(1u8, 7));
    /// # Ok::<(), mq_rbtree::BuildError>(())
    /// ```
    pub fn into_send_async(self, value: T, priority: L::Priority) -> SendFuture<'static, T, L> {
        SendFuture::keeping(self, value, priority)
    }

    #[cfg(feature = "futures")]
    pub(crate) fn lent(&self) -> Way<'_, T, L, Self> {
        Way::Lent(&self.shared.queue)
    }

    /// Sends messages from the front of `batch`: [`Queue::send_batch`](crate::Queue::send_batch).
    ///
    /// # Errors
    ///
    /// [`BatchError`]; what was not sent is in `batch`.
    pub fn send_batch(
        &self,
        batch: &mut VecDeque<Received<T, L>>,
        wait: Wait,
    ) -> Result<usize, BatchError> {
        self.shared.queue.send_batch(batch, wait)
    }
}
