//! The methods of a receiver.

use super::{Iter, Receiver, TryIter};
use crate::core::Levels;
use crate::deadline::Wait;
use crate::error::{NotifyError, ReceiveError};
use crate::queue::Received;

impl<T, L: Levels> Receiver<T, L> {
    /// Receives the next message. Waits while there is none.
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Closed`] once the queue is closed and empty.
    #[inline]
    pub fn receive(&self) -> Result<Received<T, L>, ReceiveError> {
        self.shared.queue.receive()
    }

    /// Receives the next message if there is one.
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Empty`], or [`ReceiveError::Closed`] once the queue is closed and empty.
    #[inline]
    pub fn try_receive(&self) -> Result<Received<T, L>, ReceiveError> {
        self.shared.queue.try_receive()
    }

    /// Receives the next message. Waits as `wait` says while there is none.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`].
    #[inline]
    pub fn receive_with(&self, wait: Wait) -> Result<Received<T, L>, ReceiveError> {
        self.shared.queue.receive_with(wait)
    }

    /// Receives up to `most` messages into `out`: see
    /// [`Queue::receive_batch`](crate::Queue::receive_batch).
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if it received no message.
    pub fn receive_batch(
        &self,
        out: &mut Vec<Received<T, L>>,
        most: usize,
        wait: Wait,
    ) -> Result<usize, ReceiveError> {
        self.shared.queue.receive_batch(out, most, wait)
    }

    /// Returns an iterator that receives messages. It waits for each one, and ends when the queue
    /// is closed and empty.
    ///
    /// ```
    /// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
    /// for (message, priority) in [("later", 1), ("now", 9)] {
    ///     sender.send(message, priority)?;
    /// }
    /// drop(sender);
    /// let messages: Vec<_> = receiver.iter().map(|(message, _)| message).collect();
    /// assert_eq!(messages, ["now", "later"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn iter(&self) -> Iter<'_, T, L> {
        Iter { receiver: self }
    }

    /// Returns an iterator that receives messages without waiting.
    ///
    /// It returns `None` when the queue is empty, and may return messages again later: also one that
    /// was in a [guard](crate::MessageGuard), if that is dropped after a [`close`](Self::close).
    ///
    /// ```
    /// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
    /// sender.send("later", 1)?;
    /// sender.send("now", 9)?;
    /// assert!(receiver.try_iter().map(|(message, _)| message).eq(["now", "later"]));
    /// assert!(!receiver.is_closed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_iter(&self) -> TryIter<'_, T, L> {
        TryIter { receiver: self }
    }

    /// Calls `look` with the next message, under the lock: see [`Queue::peek`](crate::Queue::peek).
    pub fn peek<R>(&self, look: impl FnOnce(&T, L::Priority) -> R) -> Option<R> {
        self.shared.queue.peek(look)
    }

    /// Removes and returns every message, highest priority first: see
    /// [`Queue::drain`](crate::Queue::drain).
    pub fn drain(&self) -> Vec<Received<T, L>> {
        self.shared.queue.drain()
    }

    /// Removes and returns every message that `take` selects; `take` runs under the lock. See
    /// [`Queue::drain_filter`](crate::Queue::drain_filter).
    pub fn drain_filter(&self, take: impl FnMut(&T, L::Priority) -> bool) -> Vec<Received<T, L>> {
        self.shared.queue.drain_filter(take)
    }

    /// Registers `notification` to be called once when a message comes to the empty queue: see
    /// [`Queue::notify`](crate::Queue::notify).
    ///
    /// # Errors
    ///
    /// [`NotifyError`] carries the notification.
    pub fn notify<F: FnOnce() + Send + 'static>(
        &self,
        notification: F,
    ) -> Result<(), NotifyError<F>> {
        self.shared.queue.notify(notification)
    }

    /// Cancels the registered notification. Returns false if there is none.
    pub fn cancel_notify(&self) -> bool {
        self.shared.queue.cancel_notify()
    }
}
