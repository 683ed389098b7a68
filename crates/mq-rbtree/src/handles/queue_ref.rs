//! References to a queue: borrowed, or through a handle.

use percpu::sync::Arc;

use crate::core::Levels;
use crate::queue::Queue;

/// What leads to a queue, and to the same one as long as it lives: `&Queue`, an `Arc` of one, a
/// [`Sender`](crate::Sender) or [`Receiver`](crate::Receiver), or a reference to one of these.
///
/// Sealed: a queue trusts it.
pub trait QueueHandle: sealed::HasQueue {}

impl<Q: sealed::HasQueue + ?Sized> QueueHandle for Q {}

/// How a future has its queue.
pub(crate) enum QueueRef<'q, T, L: Levels, H> {
    /// By reference.
    Borrowed(&'q Queue<T, L>),
    /// With a handle of its own.
    Owned(H),
}

impl<T, L: Levels, H: QueueHandle<Message = T, Levels = L>> QueueRef<'_, T, L, H> {
    #[inline(always)]
    pub(crate) fn get(&self) -> &Queue<T, L> {
        match self {
            Self::Borrowed(queue) => queue,
            Self::Owned(handle) => handle.queue(),
        }
    }
}

pub(crate) mod sealed {
    use super::{Levels, Queue};

    pub trait HasQueue {
        /// What its messages are.
        type Message;
        /// How it finds the next of them.
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
}

impl<Q: sealed::HasQueue> sealed::HasQueue for &Q {
    type Message = Q::Message;
    type Levels = Q::Levels;

    #[inline(always)]
    fn queue(&self) -> &Queue<Q::Message, Q::Levels> {
        (**self).queue()
    }
}
