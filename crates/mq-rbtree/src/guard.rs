//! A received message that goes back into the queue unless it is accepted.
//!
//! ```text
//!  levels ── lend ──► guard ── accept ──► the caller
//!     ▲                 │
//!     └──── put back ───┘ drop
//! ```
//!
//! The message stays in its slot of the store and counts for the limits, so it can always be put
//! back.

use std::fmt;
use std::future::poll_fn;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::thread;
use std::time::Instant;

use offlock_sync::AllocError;
use offlock_sync::panics::drop_payload;

use crate::core::{Bitmap, Lent, Levels, Preload};
use crate::error::ReceiveError;
use crate::queue::{Access, Look, Queue, Received, Wait};

/// A received message that goes back into the queue unless it is [accepted](Self::accept).
///
/// It comes from [`Queue::receive_guard`] and the functions beside it. A consumer that panics, returns
/// early or is cancelled between the receive and its last use of the message loses nothing: the drop
/// of the guard puts the message in front of all messages of its priority, also newer ones, and wakes
/// a receiver. That allocates nothing.
///
/// Until then the message keeps its place: it counts for every limit of the queue, and not for
/// [`len`](Queue::len). In a closed queue, receivers wait until no guard is left, because its
/// message may come back. A guard that is leaked (`mem::forget`) keeps its place for ever.
///
/// A thread or task that holds a guard must not wait on the same queue, neither to receive nor to
/// send: it may wait for the place of its own message for ever, and with a capacity of 1 a send
/// always does. To send a message again, [accept](Self::accept) it before, or use
/// [`try_send`](Queue::try_send).
///
/// ```
/// use std::panic::{AssertUnwindSafe, catch_unwind};
/// use mq_rbtree::Queue;
///
/// let queue: Queue<String> = Queue::new(1)?;
/// queue.send("a message".into(), 7)?;
/// let panicked = catch_unwind(AssertUnwindSafe(|| {
///     let message = queue.receive_guard().unwrap();
///     assert!(queue.is_full() && queue.is_empty()); // it keeps its place
///     panic!("cannot handle {:?}", *message);
/// }));
/// assert!(panicked.is_err());
/// assert_eq!(queue.try_receive_guard()?.accept(), ("a message".into(), 7)); // it is back
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a guard that is dropped puts its message back"]
pub struct MessageGuard<'q, T, L: Levels = Bitmap> {
    queue: &'q Queue<T, L>,
    lent: Lent<T, L::Priority>,
    /// The memory for the level of the message.
    preload: Preload<T, L>,
    accepted: bool,
}

// SAFETY: the guard owns its message, which moves with it, and so does the memory of its level. The
// queue is shared with other threads anyway.
unsafe impl<T: Send, L: Levels> Send for MessageGuard<'_, T, L> where L::Priority: Send + Sync {}
// SAFETY: a shared guard gives access to its message, by `&T`, and to the priority.
unsafe impl<T: Send + Sync, L: Levels> Sync for MessageGuard<'_, T, L> where L::Priority: Send + Sync
{}

impl<'q, T, L: Levels> MessageGuard<'q, T, L> {
    /// Returns the priority of the message.
    pub fn priority(&self) -> L::Priority {
        self.lent.priority
    }

    /// Takes the message out of the queue, with its priority. Its room is free from now on.
    ///
    /// # Panics
    ///
    /// Resumes the panic of a waker of a task that waits for the room. The message is dropped then.
    pub fn accept(mut self) -> Received<T, L> {
        let mut preload = mem::replace(&mut self.preload, Preload::new());
        let mut state = self.queue.lock_undrained();
        // The messages of the ring were in the queue beside this one: the drain counts their peak.
        // Those behind a hole are counted later, so that an accept waits for no sender.
        state.drain(u64::MAX);
        self.accepted = true;
        // SAFETY: `lend` of this queue has returned the message, and by `accepted` this is the
        // last use of it.
        let value = unsafe { state.core.take_lent(&self.lent, &mut preload) };
        drop(state); // a panic of a waker drops the message
        (value, self.lent.priority)
    }
}

impl<T, L: Levels> Drop for MessageGuard<'_, T, L> {
    fn drop(&mut self) {
        if self.accepted {
            return;
        }
        let mut preload = mem::replace(&mut self.preload, Preload::new());
        let mut state = self.queue.lock_undrained();
        let put_back = || {
            // SAFETY: `lend` of this queue has returned the message and the memory, and the guard ends.
            unsafe { state.core.put_back(&self.lent, &mut preload) };
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(put_back)) {
            // A comparison panicked, and nothing has changed: the message gives up its place.
            // SAFETY: the message is lent still, and the guard ends.
            let value = unsafe { state.core.take_lent(&self.lent, &mut preload) };
            drop(state);
            drop(value);
            if thread::panicking() {
                drop_payload(panic);
            } else {
                resume_unwind(panic);
            }
        }
    }
}

impl<T, L: Levels> Deref for MessageGuard<'_, T, L> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the message is lent: it is in its slot, and only this guard uses it. The queue,
        // which is borrowed, keeps the memory of its slots.
        unsafe { self.lent.value.as_ref() }
    }
}

/// A changed message goes back as it is, for example with a count of its attempts.
impl<T, L: Levels> DerefMut for MessageGuard<'_, T, L> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `&mut self` excludes other references to the message.
        unsafe { self.lent.value.as_mut() }
    }
}

/// Omits the message, which need not be `Debug`.
impl<T, L: Levels> fmt::Debug for MessageGuard<'_, T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageGuard").field("priority", &self.priority()).finish_non_exhaustive()
    }
}

type Guarded<'q, T, L> = Result<MessageGuard<'q, T, L>, ReceiveError>;

impl<T, L: Levels> Queue<T, L> {
    /// Receives the next message in a guard, which puts it back unless it is accepted. Waits while
    /// there is none, in the order of the waiting tasks.
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Closed`] once the queue is closed and neither it nor a guard has a message.
    /// [`ReceiveError::NoMemory`] only with an [`RbTree`](crate::RbTree), which needs a node for the
    /// way back.
    pub fn receive_guard(&self) -> Result<MessageGuard<'_, T, L>, ReceiveError> {
        self.receive_guard_by(Wait::Forever)
    }

    /// Receives the next message in a guard if there is one.
    ///
    /// # Errors
    ///
    /// [`ReceiveError::Empty`], or as for [`receive_guard`](Self::receive_guard).
    pub fn try_receive_guard(&self) -> Result<MessageGuard<'_, T, L>, ReceiveError> {
        self.receive_guard_by(Wait::No)
    }

    /// Receives the next message in a guard. Waits until `deadline` while there is none.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`].
    pub fn receive_guard_deadline(
        &self,
        deadline: Instant,
    ) -> Result<MessageGuard<'_, T, L>, ReceiveError> {
        self.receive_guard_by(Wait::Until(deadline))
    }

    fn receive_guard_by(&self, wait: Wait) -> Guarded<'_, T, L> {
        match self.look_to_lend(Access::Receive, wait) {
            Look::Done(found) => found,
            _ if wait == Wait::No => Err(ReceiveError::Empty),
            _ => {
                let look = || self.look_to_lend(Access::Wait, wait);
                let found = self.wait_by(self.receivers.waiter(), wait, false, look);
                found.unwrap_or(Err(ReceiveError::Timeout))
            }
        }
    }

    /// Receives the next message in a guard asynchronously.
    ///
    /// Dropping the future loses no message. For a deadline, drop it when a timer is ready. Poll it until
    /// it is ready, or drop it: see [`receive_async`](Self::receive_async).
    ///
    /// # Errors
    ///
    /// As for [`receive_guard`](Self::receive_guard).
    pub async fn receive_guard_async(&self) -> Result<MessageGuard<'_, T, L>, ReceiveError> {
        if let Look::Done(found) = self.look_to_lend(Access::Receive, Wait::Past) {
            return found;
        }
        let mut waiter = pin!(self.receivers.waiter());
        poll_fn(|cx| {
            self.poll_wait(waiter.as_mut(), cx, || self.look_to_lend(Access::Wait, Wait::Past))
        })
        .await
    }

    fn look_to_lend(&self, access: Access, wait: Wait) -> Look<Guarded<'_, T, L>> {
        let mut preload = Preload::new();
        self.hint.preload_level(&mut preload);
        let Some(mut state) = self.lock_until(access, wait) else { return Look::Hole };
        let (lent, ended) = (state.core.lend(&mut preload), state.has_ended());
        let found = match lent {
            Ok(Some(lent)) => {
                Look::Done(Ok(MessageGuard { queue: self, lent, preload, accepted: false }))
            }
            Ok(None) if ended => Look::Done(Err(ReceiveError::Closed)),
            Ok(None) => Look::Nothing,
            Err(AllocError { .. }) => Look::Done(Err(ReceiveError::NoMemory)),
        };
        drop(state); // a panic of a waker drops the guard
        found
    }
}
