//! The methods of a sender.

use std::collections::VecDeque;

use super::Sender;
use crate::core::Levels;
use crate::deadline::Wait;
use crate::error::{BatchError, SendError};
use crate::queue::Received;

impl<T, L: Levels> Sender<T, L> {
    /// Sends a message. Waits while there is no room.
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason.
    #[inline]
    pub fn send(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        self.shared.queue.send(value, priority)
    }

    /// Sends a message if there is room now.
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason.
    #[inline]
    pub fn try_send(&self, value: T, priority: L::Priority) -> Result<(), SendError<T>> {
        self.shared.queue.try_send(value, priority)
    }

    /// Sends a message. Waits as `wait` says while there is no room.
    ///
    /// # Errors
    ///
    /// [`SendError`] carries the message and the reason.
    #[inline]
    pub fn send_with(
        &self,
        value: T,
        priority: L::Priority,
        wait: Wait,
    ) -> Result<(), SendError<T>> {
        self.shared.queue.send_with(value, priority, wait)
    }

    /// Sends messages from the front of `batch`: see
    /// [`Queue::send_batch`](crate::Queue::send_batch).
    ///
    /// # Errors
    ///
    /// [`BatchError`]; the messages that were not sent are in `batch`.
    pub fn send_batch(
        &self,
        batch: &mut VecDeque<Received<T, L>>,
        wait: Wait,
    ) -> Result<usize, BatchError> {
        self.shared.queue.send_batch(batch, wait)
    }
}
