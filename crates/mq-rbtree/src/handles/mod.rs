//! A handle for each side of a queue: the last of a side closes it.
//!
//! A side has the methods that are its own, and those that look: a receiver does not send.

mod iter;
mod queue_ref;
mod receiver;
mod sender;

use std::fmt;

use percpu::sync::atomic::{AtomicUsize, Ordering, fence};
use percpu::sync::{Arc, check, step};

pub use self::iter::{IntoIter, Iter, TryIter};
pub use self::queue_ref::QueueHandle;
pub(crate) use self::queue_ref::QueueRef;

use self::queue_ref::sealed::HasQueue;
use crate::core::{Bitmap, Levels};
use crate::error::BuildError;
use crate::queue::{Builder, Queue};
use crate::stats::QueueStats;

/// The side that sends: [`Builder::channel`](crate::Builder::channel).
///
/// Clones are of the same side. When the last is dropped the queue closes: what is in it can be
/// received.
///
/// ```compile_fail,E0599
/// let (sender, receiver) = mq_rbtree::Queue::<u8>::builder(1).channel()?;
/// sender.receive();
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
pub struct Sender<T, L: Levels = Bitmap> {
    shared: Arc<Shared<T, L>>,
}

/// The side that receives: [`Builder::channel`](crate::Builder::channel).
///
/// Clones are of the same side; each message goes to one of them. When the last is dropped the queue
/// closes, and its messages are dropped.
///
/// ```compile_fail,E0599
/// let (sender, receiver) = mq_rbtree::Queue::<u8>::builder(1).channel()?;
/// receiver.send(1, 1);
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
pub struct Receiver<T, L: Levels = Bitmap> {
    shared: Arc<Shared<T, L>>,
}

struct Shared<T, L: Levels> {
    queue: Queue<T, L>,
    senders: AtomicUsize,
    receivers: AtomicUsize,
}

/// A handle for each side of a queue.
type Sides<T, L> = (Sender<T, L>, Receiver<T, L>);

impl<T, L: Levels> Builder<T, L> {
    /// Makes it, with a handle for each side: when the last of a side is dropped, the queue closes.
    ///
    /// # Errors
    ///
    /// [`BuildError`].
    pub fn channel(self) -> Result<Sides<T, L>, BuildError> {
        let queue = self.build()?;
        let (senders, receivers) = (AtomicUsize::new(1), AtomicUsize::new(1));
        let shared = Arc::new(Shared { queue, senders, receivers });
        Ok((Sender { shared: Arc::clone(&shared) }, Receiver { shared }))
    }
}

/// Counts a handle out; true if it was the last.
fn was_last(count: &AtomicUsize) -> bool {
    // Ordering: Release pairs with the fence of the last one; it carries what was done by this handle.
    let last = check!("drop: the last handle", count.fetch_sub(1, Ordering::Release) == 1);
    if last {
        // Ordering: Acquire, of what the others did before they were dropped.
        fence(Ordering::Acquire);
    }
    last
}

macro_rules! side {
    ($name:ident, $count:ident) => {
        impl<T, L: Levels> Clone for $name<T, L> {
            fn clone(&self) -> Self {
                // Ordering: Relaxed; this handle keeps the count above 0.
                self.shared.$count.fetch_add(1, Ordering::Relaxed);
                Self { shared: Arc::clone(&self.shared) }
            }
        }

        impl<T, L: Levels> $name<T, L> {
            /// Messages in the queue.
            pub fn len(&self) -> usize {
                self.shared.queue.len()
            }

            /// True if there is no message.
            pub fn is_empty(&self) -> bool {
                self.shared.queue.is_empty()
            }

            /// True if there is no room for any message: [`Queue::is_full`].
            pub fn is_full(&self) -> bool {
                self.shared.queue.is_full()
            }

            /// Messages of one priority.
            pub fn len_at(&self, priority: L::Priority) -> usize {
                self.shared.queue.len_at(priority)
            }

            /// Bytes of the messages in the queue, as measured.
            pub fn bytes(&self) -> u64 {
                self.shared.queue.bytes()
            }

            /// Most messages that the queue takes.
            #[doc(alias = "capacity")]
            pub fn max_messages(&self) -> usize {
                self.shared.queue.max_messages()
            }

            /// Most bytes that one message may have.
            pub fn max_message_bytes(&self) -> usize {
                self.shared.queue.max_message_bytes()
            }

            /// Bytes that the queue has of its quota.
            pub fn charged(&self) -> u64 {
                self.shared.queue.charged()
            }

            /// Whether the queue refuses messages: it was closed, or a side is gone.
            #[doc(alias = "is_disconnected")]
            pub fn is_closed(&self) -> bool {
                self.shared.queue.is_closed()
            }

            /// Closes the queue for all, whoever else has handles: [`Queue::close`].
            pub fn close(&self) -> bool {
                self.shared.queue.close()
            }

            /// What the queue did and what it holds.
            pub fn stats(&self) -> QueueStats {
                self.shared.queue.stats()
            }

            /// Whether another handle, of whichever side, is of the same queue.
            #[doc(alias = "same_channel")]
            pub fn same_queue(&self, other: &impl QueueHandle<Message = T, Levels = L>) -> bool {
                std::ptr::eq(&raw const self.shared.queue, other.queue())
            }

            pub(crate) fn queue(&self) -> &Queue<T, L> {
                &self.shared.queue
            }

            #[doc(hidden)]
            pub fn validate(&self) {
                self.shared.queue.validate();
            }
        }

        impl<T, L: Levels> HasQueue for $name<T, L> {
            type Message = T;
            type Levels = L;

            #[inline(always)]
            fn queue(&self) -> &Queue<T, L> {
                &self.shared.queue
            }
        }

        impl<T, L: Levels> fmt::Debug for $name<T, L> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.shared.queue).finish()
            }
        }
    };
}

side!(Sender, senders);
side!(Receiver, receivers);

impl<T, L: Levels> Drop for Sender<T, L> {
    fn drop(&mut self) {
        if was_last(&self.shared.senders) {
            self.shared.queue.close();
        }
    }
}

impl<T, L: Levels> Drop for Receiver<T, L> {
    fn drop(&mut self) {
        if was_last(&self.shared.receivers) {
            step!("last receiver: close before the drain", self.shared.queue.close());
            // One by one: neither a lock for long nor memory for all of them.
            while self.shared.queue.try_receive().is_ok() {}
        }
    }
}
