//! The methods of the handles that only call those of the queue.

use std::collections::VecDeque;
use std::future::Future;

use super::{QueueHandle, Receiver, Sender};
use crate::core::Levels;
use crate::deadline::Wait;
use crate::error::{BatchError, ReceiveError, SendError};
use crate::futures::{ReceiveFuture, SendFuture};
use crate::guard::MessageGuard;
use crate::queue::Received;
use crate::stats::QueueStats;

/// Writes methods that call the queue's of the same name.
macro_rules! forward {
    ($($(#[$attr:meta])* $name:ident$([$($generic:tt)*])?($($arg:ident: $of:ty),*)
        $(-> $result:ty)?;)*) => {$(
        $(#[$attr])*
        #[doc = ""]
        #[doc = concat!("See [`Queue::", stringify!($name), "`](crate::Queue::", stringify!($name), ") for its errors and an example.")]
        #[inline]
        pub fn $name$(<$($generic)*>)?(&self, $($arg: $of),*) $(-> $result)? {
            self.shared.queue.$name($($arg),*)
        }
    )*};
}

macro_rules! of_both_sides {
    ($($side:ident)*) => {$(
        impl<T, L: Levels> $side<T, L> {
            forward! {
                /// Returns the number of messages in the queue.
                len() -> usize;
                /// Returns true if there is no message.
                is_empty() -> bool;
                /// Returns true if no message has room, of any priority.
                is_full() -> bool;
                /// Returns the number of messages of one priority.
                len_at(priority: L::Priority) -> usize;
                /// Returns the most messages that the queue holds.
                #[doc(alias = "capacity")]
                max_messages() -> usize;
                /// Returns whether the queue refuses messages: it was closed, or the last handle of a
                /// side was dropped.
                #[doc(alias = "is_disconnected")]
                is_closed() -> bool;
                /// Closes the queue for all handles.
                close() -> bool;
                /// Returns statistics of the queue.
                stats() -> QueueStats;
                #[doc(hidden)]
                validate();
            }

            /// Returns whether another handle, of either side, belongs to the same queue.
            #[doc(alias = "same_channel")]
            pub fn same_queue(&self, other: &impl QueueHandle<Message = T, Levels = L>) -> bool {
                std::ptr::eq(&self.shared.queue, other.queue())
            }
        }
    )*};
}

of_both_sides!(Sender Receiver);

impl<T, L: Levels> Sender<T, L> {
    forward! {
        /// Sends a message. Waits while there is no room.
        send(value: T, priority: L::Priority) -> Result<(), SendError<T>>;
        /// Sends a message if there is room now.
        try_send(value: T, priority: L::Priority) -> Result<(), SendError<T>>;
        /// Sends a message. Waits as `wait` says while there is no room.
        send_with(value: T, priority: L::Priority, wait: Wait) -> Result<(), SendError<T>>;
        /// Sends messages from the front of `batch`. Those that were not sent are still in it.
        send_batch(batch: &mut VecDeque<Received<T, L>>, wait: Wait) -> Result<usize, BatchError>;
        /// Sends a message asynchronously.
        send_async(value: T, priority: L::Priority) -> SendFuture<'_, T, L>;
    }
}

impl<T, L: Levels> Receiver<T, L> {
    forward! {
        /// Receives the next message. Waits while there is none.
        receive() -> Result<Received<T, L>, ReceiveError>;
        /// Receives the next message if there is one.
        try_receive() -> Result<Received<T, L>, ReceiveError>;
        /// Receives the next message. Waits as `wait` says while there is none.
        receive_with(wait: Wait) -> Result<Received<T, L>, ReceiveError>;
        /// Receives up to `most` messages into `out`.
        receive_batch(out: &mut Vec<Received<T, L>>, most: usize, wait: Wait)
            -> Result<usize, ReceiveError>;
        /// Receives the next message asynchronously.
        receive_async() -> ReceiveFuture<'_, T, L>;
        /// Receives up to `most` messages into `out` asynchronously.
        receive_batch_async(out: &mut Vec<Received<T, L>>, most: usize)
            -> impl Future<Output = Result<usize, ReceiveError>>;
        /// Receives the next message in a guard, which puts it back unless it is accepted.
        receive_guard() -> Result<MessageGuard<'_, T, L>, ReceiveError>;
        /// Receives the next message in a guard if there is one.
        try_receive_guard() -> Result<MessageGuard<'_, T, L>, ReceiveError>;
        /// Receives the next message in a guard. Waits as `wait` says while there is none.
        receive_guard_with(wait: Wait) -> Result<MessageGuard<'_, T, L>, ReceiveError>;
        /// Receives the next message in a guard asynchronously.
        receive_guard_async()
            -> impl Future<Output = Result<MessageGuard<'_, T, L>, ReceiveError>>;
        /// Calls `look` with the next message, under the lock.
        peek[R](look: impl FnOnce(&T, L::Priority) -> R) -> Option<R>;
        /// Removes and returns every message, highest priority first.
        drain() -> Vec<Received<T, L>>;
        /// Removes and returns every message that `take` selects; `take` runs under the lock.
        drain_filter(take: impl FnMut(&T, L::Priority) -> bool) -> Vec<Received<T, L>>;
    }
}
