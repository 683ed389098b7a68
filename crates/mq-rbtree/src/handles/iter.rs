//! Iterators over the messages of a receiver.

use std::fmt;
use std::iter::FusedIterator;

use super::Receiver;
use crate::core::{Bitmap, Levels};
use crate::queue::Received;

/// An iterator that waits for each message and ends when the queue is closed and empty.
///
/// It comes from [`Receiver::iter`], or from a loop over `&receiver`.
///
/// ```
/// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
/// sender.send("a message", 7)?;
/// drop(sender); // closes the queue
/// for (message, priority) in &receiver {
///     assert_eq!((message, priority), ("a message", 7));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Iter<'r, T, L: Levels = Bitmap> {
    pub(super) receiver: &'r Receiver<T, L>,
}

/// An iterator that receives messages without waiting: see [`Receiver::try_iter`].
///
/// ```
/// let (sender, receiver) = mq_rbtree::Queue::builder(8).channel()?;
/// sender.send("a message", 7)?;
/// let mut messages = receiver.try_iter();
/// assert_eq!((messages.next(), messages.next()), (Some(("a message", 7)), None));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TryIter<'r, T, L: Levels = Bitmap> {
    pub(super) receiver: &'r Receiver<T, L>,
}

/// An iterator that owns its receiver, waits for each message, and ends when the queue is closed
/// and empty.
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
pub struct IntoIter<T, L: Levels = Bitmap> {
    receiver: Receiver<T, L>,
}

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
}

impl<T, L: Levels> Iterator for Iter<'_, T, L> {
    type Item = Received<T, L>;

    fn next(&mut self) -> Option<Received<T, L>> {
        self.receiver.receive().ok()
    }
}

impl<T, L: Levels> Iterator for TryIter<'_, T, L> {
    type Item = Received<T, L>;

    fn next(&mut self) -> Option<Received<T, L>> {
        self.receiver.try_receive().ok()
    }
}

impl<T, L: Levels> Iterator for IntoIter<T, L> {
    type Item = Received<T, L>;

    fn next(&mut self) -> Option<Received<T, L>> {
        self.receiver.receive().ok()
    }
}

// A closed queue stays closed, so the end is final.
impl<T, L: Levels> FusedIterator for Iter<'_, T, L> {}
impl<T, L: Levels> FusedIterator for IntoIter<T, L> {}

impl<'r, T, L: Levels> IntoIterator for &'r Receiver<T, L> {
    type Item = Received<T, L>;
    type IntoIter = Iter<'r, T, L>;

    fn into_iter(self) -> Iter<'r, T, L> {
        self.iter()
    }
}

impl<T, L: Levels> IntoIterator for Receiver<T, L> {
    type Item = Received<T, L>;
    type IntoIter = IntoIter<T, L>;

    fn into_iter(self) -> IntoIter<T, L> {
        IntoIter { receiver: self }
    }
}

macro_rules! debug {
    ($($name:ident<$($life:lifetime,)? T, L>)*) => {$(
        impl<T, L: Levels> fmt::Debug for $name<$($life,)? T, L> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.receiver).finish()
            }
        }
    )*};
}

debug!(Iter<'_, T, L> TryIter<'_, T, L> IntoIter<T, L>);
