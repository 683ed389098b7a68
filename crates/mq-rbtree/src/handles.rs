//! Handles for the two sides of a queue. The queue closes with the last handle of a side.
//!
//! A handle has the methods of its queue.

use std::fmt;
use std::iter::FusedIterator;
use std::ops::Deref;
use std::time::{Duration, Instant};

use offlock_sync::atomic::{AtomicUsize, Ordering, fence};
use offlock_sync::{Arc, check, step};

use crate::core::{Bitmap, Levels};
use crate::error::BuildError;
use crate::queue::{Builder, Look, Queue, Received, Wait};

/// The sending side of a queue: see [`Builder::channel`](crate::Builder::channel).
///
/// It has the methods of its [`Queue`]. Clones are senders of the same queue. When the last sender is dropped the queue closes, and the
/// messages in it can still be received.
///
/// ```
/// use std::thread;
/// use mq_rbtree::Queue;
///
/// let (sender, receiver) = Queue::builder(8).channel()?;
/// for n in 0..3 {
///     let sender = sender.clone();
///     thread::spawn(move || sender.send(n, n).unwrap());
/// }
/// drop(sender);
/// let mut all: Vec<_> = receiver.iter().map(|(n, _)| n).collect(); // until all three have sent
/// all.sort();
/// assert_eq!(all, [0, 1, 2]);
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
pub struct Sender<T, L: Levels = Bitmap> {
    shared: Arc<Shared<T, L>>,
}

/// The receiving side of a queue: see [`Builder::channel`](crate::Builder::channel).
///
/// It has the methods of its [`Queue`]. Clones are receivers of the same queue; each message goes to one of
/// them. When the last receiver
/// is dropped the queue closes, and its messages are dropped. A message that a guard puts back later stays until
/// the last sender is dropped, and so do those behind a sender that is stopped between its claim and its
/// publication for 50 ms.
///
/// ```
/// use mq_rbtree::{Queue, ReceiveError};
///
/// let (sender, receiver) = Queue::builder(8).channel()?;
/// sender.send("a message", 7)?;
/// assert_eq!(receiver.receive()?, ("a message", 7));
/// assert_eq!(receiver.try_receive(), Err(ReceiveError::Empty));
/// drop(receiver);
/// assert!(sender.send("another", 7).is_err()); // the queue is closed
/// # Ok::<(), Box<dyn std::error::Error>>(())
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
    /// Makes the queue, with a handle for each side. It closes when the last handle of a side is
    /// dropped.
    ///
    /// # Errors
    ///
    /// As for [`build`](Self::build).
    pub fn channel(self) -> Result<Sides<T, L>, BuildError> {
        let queue = self.build()?;
        let (senders, receivers) = (AtomicUsize::new(1), AtomicUsize::new(1));
        let shared = Arc::new(Shared { queue, senders, receivers });
        Ok((Sender { shared: shared.clone() }, Receiver { shared }))
    }
}

/// Subtracts a handle from the count. Returns true if it was the last one.
fn was_last(count: &AtomicUsize) -> bool {
    // Ordering: Release pairs with the Acquire fence below in the last handle's drop; it carries
    // what was done through this handle.
    let last = check!("drop: the last handle", count.fetch_sub(1, Ordering::Release) == 1);
    if last {
        // Ordering: Acquire fence, pairs with the Release of the other handles' drops; it carries
        // what was done through them: claims on the ring, which the close must come after. No model
        // checks it, because loom runs exchanges of one word in the order of the steps.
        fence(Ordering::Acquire);
    }
    last
}

macro_rules! side {
    ($name:ident, $count:ident) => {
        impl<T, L: Levels> Clone for $name<T, L> {
            fn clone(&self) -> Self {
                // Ordering: Relaxed; this handle keeps the count above 0, and the count publishes
                // nothing.
                self.shared.$count.fetch_add(1, Ordering::Relaxed);
                Self { shared: self.shared.clone() }
            }
        }

        impl<T, L: Levels> Deref for $name<T, L> {
            type Target = Queue<T, L>;

            #[inline(always)]
            fn deref(&self) -> &Queue<T, L> {
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
            self.close();
        }
    }
}

/// So long the drop of the last receiver waits for a sender that is stopped between its claim and its
/// publication: some time slices, as a sender that was preempted needs.
const FOR_A_SENDER: Duration = Duration::from_millis(50);

impl<T, L: Levels> Drop for Receiver<T, L> {
    fn drop(&mut self) {
        if was_last(&self.shared.receivers) {
            step!("last receiver: close before the drain", self.close());
            // One by one: this neither holds the lock for long nor needs memory for all messages. If the
            // drop of one panics, the drop of the queue drops the others. A message in a guard is not
            // waited for, as a receive does.
            let look = || self.look_to_receive(Wait::Until(Instant::now() + FOR_A_SENDER));
            while let Look::Done(Ok(_)) = look() {}
        }
    }
}

// References to a queue: borrowed, or through a handle.

/// A reference to a queue: `&Queue`, an `Arc` of one, a [`Sender`](crate::Sender), a
/// [`Receiver`](crate::Receiver), or a reference to one of these.
///
/// [`Readiness`](crate::Readiness) is generic over it. The trait is sealed, because a queue relies
/// on a handle always leading to the same queue.
///
/// ```
/// use std::sync::Arc;
/// use mq_rbtree::{Interest, Queue, QueueHandle, Readiness, ReadinessError};
///
/// fn readable<Q: QueueHandle>(queue: Q) -> Result<Readiness<Q>, ReadinessError<Q>> {
///     Readiness::new(queue, Interest::Readable)
/// }
///
/// let queue: Arc<Queue<u8>> = Arc::new(Queue::new(8).unwrap());
/// let ready = readable(Arc::clone(&queue)).unwrap();
/// assert!(readable(&*queue).is_err()); // there is one for that direction already
/// drop(ready);
/// ```
pub trait QueueHandle: sealed::HasQueue {}

impl<Q: sealed::HasQueue + ?Sized> QueueHandle for Q {}

pub(crate) mod sealed {
    use super::{Levels, Queue};

    pub trait HasQueue {
        /// The type of the queue's messages.
        type Message;
        /// The type of the queue's levels.
        type Levels: Levels;

        #[doc(hidden)]
        fn queue(&self) -> &Queue<Self::Message, Self::Levels>;
    }
}

macro_rules! impl_has_queue {
    ($($handle:ty: |$this:ident| $queue:expr;)*) => {$(
        impl<T, L: Levels> sealed::HasQueue for $handle {
            type Message = T;
            type Levels = L;

            #[inline(always)]
            fn queue(&self) -> &Queue<T, L> {
                let $this = self;
                $queue
            }
        }
    )*};
}

impl_has_queue! {
    Queue<T, L>: |queue| queue;
    Arc<Queue<T, L>>: |queue| queue;
    Sender<T, L>: |sender| sender;
    Receiver<T, L>: |receiver| receiver;
}

impl<Q: sealed::HasQueue> sealed::HasQueue for &Q {
    type Message = Q::Message;
    type Levels = Q::Levels;

    #[inline(always)]
    fn queue(&self) -> &Queue<Q::Message, Q::Levels> {
        (**self).queue()
    }
}

// Iterators over the messages of a receiver.

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
    pub fn iter(&self) -> Iter<&Self> {
        Iter(self)
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
