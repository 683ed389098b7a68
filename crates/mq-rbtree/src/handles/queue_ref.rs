//! References to a queue: borrowed, or through a handle.

use percpu::sync::Arc;

use super::{Receiver, Sender};
use crate::core::Levels;
use crate::queue::Queue;

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

/// The reference of a future to its queue.
pub(crate) enum QueueRef<'q, T, L: Levels> {
    Borrowed(&'q Queue<T, L>),
    #[cfg(feature = "stream")]
    Owned(Receiver<T, L>),
}

impl<T, L: Levels> QueueRef<'_, T, L> {
    #[inline(always)]
    pub(crate) fn get(&self) -> &Queue<T, L> {
        match self {
            Self::Borrowed(queue) => queue,
            #[cfg(feature = "stream")]
            Self::Owned(receiver) => receiver,
        }
    }
}

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
