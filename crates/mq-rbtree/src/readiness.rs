//! A file descriptor for event loops: readable when the queue has a message, or room.
//!
//! ```text
//!   arm ── the queue has or gets a message ──► eventfd is signalled once ──► epoll
//!    ▲                                                                         │
//!    └──────────────── clear: read it, arm again, check the queue ◄────────────┘
//! ```
//!
//! While it is not armed, sends and receives make no system call for it.

use std::error::Error;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use offlock_sync::step;

use crate::error::gives_back;
use crate::handles::QueueHandle;
use crate::notifier::{EventNotifier, Interest};
use crate::queue::{Access, Wait};

/// A [`Readiness`] was refused: carries the queue and the reason.
///
/// ```
/// use mq_rbtree::{Interest, Queue, Readiness};
///
/// let (sender, receiver) = Queue::<&str>::builder(8).channel()?;
/// let ready = Readiness::new(&receiver, Interest::Readable)?;
/// let refused = Readiness::new(receiver.clone(), Interest::Readable).unwrap_err();
/// assert_eq!(refused.reason.kind(), std::io::ErrorKind::ResourceBusy); // `EBUSY`
/// assert!(std::ptr::eq(&*refused.queue, &*receiver)); // the clone comes back
/// # drop(sender);
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct ReadinessError<Q> {
    /// The handle or reference that was passed in.
    pub queue: Q,
    /// `EBUSY` if that direction has a [`Readiness`], or the error of `eventfd`.
    pub reason: io::Error,
}

gives_back!(ReadinessError, queue, "handle or reference that was passed in");

/// A file descriptor that becomes readable when a queue has a message, or room.
///
/// It is for epoll, or for tokio's `AsyncFd`. A queue has at most one for each direction. The event
/// loop waits until the descriptor is readable, calls [`clear`](Self::clear), receives (or sends)
/// until that is refused, and waits again.
///
/// ```
/// use std::os::fd::AsFd;
/// use mq_rbtree::{Interest, Queue, Readiness};
///
/// let queue: Queue<&str> = Queue::new(8)?;
/// let ready = Readiness::new(&queue, Interest::Readable)?;
/// let _for_epoll = ready.as_fd();
/// queue.send("work", 3)?;
/// // It is readable now.
/// ready.clear();
/// while let Ok((message, priority)) = queue.try_receive() {
///     assert_eq!((message, priority), ("work", 3));
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Readiness<Q: QueueHandle> {
    handle: Q,
    notifier: Arc<EventNotifier>,
    interest: Interest,
}

impl<Q: QueueHandle> Readiness<Q> {
    /// Creates a descriptor for one direction of a queue.
    ///
    /// `handle` is a reference to the queue, an `Arc` of it, or a [`Sender`](crate::Sender) or
    /// [`Receiver`](crate::Receiver), by value or by reference.
    ///
    /// # Errors
    ///
    /// [`ReadinessError`] carries `handle`. The reason is `EBUSY` if the direction has a descriptor,
    /// or the error of `eventfd`.
    pub fn new(handle: Q, interest: Interest) -> Result<Self, ReadinessError<Q>> {
        match Self::register(&handle, interest as usize) {
            Ok(notifier) => {
                let made = Self { handle, notifier, interest };
                made.clear(); // arms it
                Ok(made)
            }
            Err(reason) => Err(ReadinessError { queue: handle, reason }),
        }
    }

    fn register(handle: &Q, direction: usize) -> io::Result<Arc<EventNotifier>> {
        let queue = handle.queue();
        let notifier = Arc::new(EventNotifier::try_new()?);
        {
            let mut state = queue.lock_undrained();
            if state.notifiers[direction].is_some() {
                drop(state);
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            state.notifiers[direction] = Some(notifier.clone());
        }
        Ok(notifier)
    }

    /// Makes the descriptor unreadable until the queue has a message, or room. If it has that now,
    /// the descriptor becomes readable again at once.
    ///
    /// It does not wait for a sender that is stopped between its claim and its publication: the
    /// descriptor becomes readable again at once, and the event loop comes back.
    pub fn clear(&self) {
        self.notifier.clear();
        let queue = self.handle.queue();
        let Some(mut state) = queue.lock_until(Access::Wait, Wait::Past) else {
            step!("clear: come back for the stopped sender", self.notifier.signal());
            drop(queue.give_up());
            return;
        };
        // The unlock signals it at once if the queue has a message, or room.
        step!("clear: arm after the read", state.armed |= 1 << self.interest as usize);
    }
}

impl<Q: QueueHandle> fmt::Debug for Readiness<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readiness")
            .field("interest", &self.interest)
            .field("notifier", &*self.notifier)
            .finish()
    }
}

impl<Q: QueueHandle> AsFd for Readiness<Q> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }
}

impl<Q: QueueHandle> AsRawFd for Readiness<Q> {
    fn as_raw_fd(&self) -> RawFd {
        self.notifier.as_fd().as_raw_fd()
    }
}

impl<Q: QueueHandle> Drop for Readiness<Q> {
    fn drop(&mut self) {
        let mut state = self.handle.queue().lock_undrained();
        // An armed bit stays set: the next event clears it and finds no notifier.
        let notifier = state.notifiers[self.interest as usize].take();
        drop(state);
        drop(notifier);
    }
}
