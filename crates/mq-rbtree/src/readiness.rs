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

use crate::event::{Bell, READABLE, WRITABLE};
use crate::handles::QueueHandle;
use crate::queue::After;

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
    fn which(self) -> usize {
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
    bell: Arc<Bell>,
    which: usize,
}

impl<Q: QueueHandle> Readiness<Q> {
    /// A descriptor for one direction of the queue that `handle` leads to: a handle of its own or by
    /// reference, the queue by reference or in an `Arc`.
    ///
    /// # Errors
    ///
    /// [`ReadinessError`] with the queue: `EBUSY` if that direction has one; what `eventfd` says.
    pub fn new(handle: Q, interest: Interest) -> Result<Self, ReadinessError<Q>> {
        let which = interest.which();
        match Self::register(&handle, which) {
            Ok(bell) => Ok(Self { handle, bell, which }),
            Err(reason) => Err(ReadinessError { queue: handle, reason }),
        }
    }

    /// What it was made with.
    pub fn get_ref(&self) -> &Q {
        &self.handle
    }

    fn register(handle: &Q, which: usize) -> io::Result<Arc<Bell>> {
        let queue = handle.queue();
        let bell = Arc::new(Bell::try_new()?);
        let mut after = After::new();
        {
            let mut state = queue.lock();
            if state.bells[which].is_some() {
                drop(state);
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            state.bells[which] = Some(Arc::clone(&bell));
            state.armed |= 1 << which;
            state.ring(&queue.config, &mut after);
        }
        after.run();
        Ok(bell)
    }

    /// Makes it unreadable until the next message, or room: at once if that is there now.
    pub fn clear(&self) {
        self.bell.silence();
        let mut after = After::new();
        let queue = self.handle.queue();
        {
            let mut state = queue.lock();
            step!("clear: arm after the silence", state.armed |= 1 << self.which);
            step!("clear: look after arming", state.ring(&queue.config, &mut after));
        }
        after.run();
    }
}

impl<Q: QueueHandle> fmt::Debug for Readiness<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let interest = if self.which == READABLE { Interest::Readable } else { Interest::Writable };
        f.debug_struct("Readiness").field("interest", &interest).field("bell", &self.bell).finish()
    }
}

impl<Q: QueueHandle> AsFd for Readiness<Q> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl<Q: QueueHandle> AsRawFd for Readiness<Q> {
    fn as_raw_fd(&self) -> RawFd {
        self.bell.as_fd().as_raw_fd()
    }
}

impl<Q: QueueHandle> Drop for Readiness<Q> {
    fn drop(&mut self) {
        let mut state = self.handle.queue().lock();
        state.armed &= !(1 << self.which);
        let bell = state.bells[self.which].take();
        drop(state);
        drop(bell);
    }
}
