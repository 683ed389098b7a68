//! Iterators over the messages of a receiver.

use std::iter::{self, FusedIterator};

use super::{QueueHandle, Receiver};
use crate::core::Levels;
use crate::queue::Received;

/// An iterator that waits for each message and ends when the queue is closed and empty.
///
/// It comes from [`Receiver::iter`], or from a loop over a receiver or a reference to one.
///
/// ```
/// use std::thread;
///
/// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
/// let worker = thread::spawn(move || receiver.into_iter().map(|(n, _)| n).sum::<u32>());
/// for n in 1..=4 {
///     sender.send(n, 7)?;
/// }
/// drop(sender); // closes the queue
/// assert_eq!(worker.join().unwrap(), 10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Iter<R>(R);

impl<T, L: Levels> Receiver<T, L> {
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
    pub fn iter(&self) -> Iter<&Self> {
        Iter(self)
    }

    /// Returns an iterator that receives messages without waiting.
    ///
    /// It returns `None` when the queue is empty, and may return messages again later: also one that
    /// was in a [guard](crate::MessageGuard), if that is dropped after a [`close`](crate::Queue::close).
    ///
    /// ```
    /// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
    /// sender.send("later", 1)?;
    /// sender.send("now", 9)?;
    /// assert!(receiver.try_iter().map(|(message, _)| message).eq(["now", "later"]));
    /// assert!(!receiver.is_closed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_iter(&self) -> impl Iterator<Item = Received<T, L>> {
        iter::from_fn(|| self.try_receive().ok())
    }
}

impl<R: QueueHandle> Iterator for Iter<R> {
    type Item = Received<R::Message, R::Levels>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.queue().receive().ok()
    }
}

// A closed queue stays closed, so the end is final.
impl<R: QueueHandle> FusedIterator for Iter<R> {}

impl<T, L: Levels> IntoIterator for &Receiver<T, L> {
    type Item = Received<T, L>;
    type IntoIter = Iter<Self>;

    fn into_iter(self) -> Iter<Self> {
        self.iter()
    }
}

impl<T, L: Levels> IntoIterator for Receiver<T, L> {
    type Item = Received<T, L>;
    type IntoIter = Iter<Self>;

    fn into_iter(self) -> Iter<Self> {
        Iter(self)
    }
}
