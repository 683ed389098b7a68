//! A descriptor for foreign event loops: readable when the queue has a message, or room.
//!
//! ```text
//!   arm ── a message is there, or comes ──► eventfd rings, once ──► epoll
//!    ▲                                                                │
//!    └──────────────── clear: read it, look, arm again ◄──────────────┘
//! ```
//!
//! While it is not armed, sends and receives make no system call for it.

use std::error::Error;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use percpu::sync::{Arc, step};

use crate::event::{EventNotifier, READABLE, WRITABLE};
use crate::handles::QueueHandle;
use crate::queue::Deferred;

/// What a [`Readiness`] tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// A message is there, or the queue is closed.
    Readable,
    /// There is room, or the queue is closed. A message may still find too little: too few bytes, or
    /// only what is reserved for others.
    Writable,
}

impl Interest {
    fn direction(self) -> usize {
        match self {
            Self::Readable => READABLE,
            Self::Writable => WRITABLE,
        }
    }
}

/// Why there is no [`Readiness`], and what it was to be for.
pub struct ReadinessError<Q> {
    /// What leads to the queue.
    pub queue: Q,
    /// What the system said, or `EBUSY`.
    pub reason: io::Error,
}

/// Without the queue, which need not be `Debug`.
impl<Q> fmt::Debug for ReadinessError<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadinessError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<Q> fmt::Display for ReadinessError<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl<Q> Error for ReadinessError<Q> {}

impl<Q> From<ReadinessError<Q>> for io::Error {
    fn from(error: ReadinessError<Q>) -> Self {
        error.reason
    }
}

/// A descriptor that becomes readable when a queue has a message, or room: for epoll, or for tokio's
/// `AsyncFd`.
///
/// One for each direction of a queue. The loop: wait until it is readable, [`clear`](Self::clear) it,
/// then receive (or send) until that is refused, and wait again.
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
    direction: usize,
}

impl<Q: QueueHandle> Readiness<Q> {
    /// A descriptor for one direction of the queue that `handle` leads to: a handle of its own or by
    /// reference, the queue by reference or in an `Arc`.
    ///
    /// # Errors
    ///
    /// [`ReadinessError`] with the queue: `EBUSY` if that direction has one; what `eventfd` says.
    pub fn new(handle: Q, interest: Interest) -> Result<Self, ReadinessError<Q>> {
        let direction = interest.direction();
        match Self::register(&handle, direction) {
            Ok(notifier) => Ok(Self { handle, notifier, direction }),
            Err(reason) => Err(ReadinessError { queue: handle, reason }),
        }
    }

    /// What it was made with.
    pub fn get_ref(&self) -> &Q {
        &self.handle
    }

    fn register(handle: &Q, direction: usize) -> io::Result<Arc<EventNotifier>> {
        let queue = handle.queue();
        let notifier = Arc::new(EventNotifier::try_new()?);
        let mut deferred = Deferred::new();
        {
            let mut state = queue.lock();
            if state.notifiers[direction].is_some() {
                drop(state);
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            state.notifiers[direction] = Some(Arc::clone(&notifier));
            state.armed |= 1 << direction;
            state.signal_notifiers(&queue.config, &mut deferred);
        }
        deferred.run();
        Ok(notifier)
    }

    /// Makes it unreadable until the next message, or room: at once if that is there now.
    pub fn clear(&self) {
        self.notifier.clear();
        let mut deferred = Deferred::new();
        let queue = self.handle.queue();
        {
            let mut state = queue.lock();
            step!("clear: arm after the read", state.armed |= 1 << self.direction);
            step!(
                "clear: check after arming",
                state.signal_notifiers(&queue.config, &mut deferred)
            );
        }
        deferred.run();
    }
}

impl<Q: QueueHandle> fmt::Debug for Readiness<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let interest =
            if self.direction == READABLE { Interest::Readable } else { Interest::Writable };
        f.debug_struct("Readiness")
            .field("interest", &interest)
            .field("notifier", &self.notifier)
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
        let mut state = self.handle.queue().lock();
        state.armed &= !(1 << self.direction);
        let notifier = state.notifiers[self.direction].take();
        drop(state);
        drop(notifier);
    }
}
