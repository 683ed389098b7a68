//! The events that a queue reports to an event loop, and the eventfd that its unlock signals.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// The event that a [`Readiness`](crate::Readiness) reports.
///
/// ```
/// use mq_rbtree::{Interest, Queue, Readiness};
///
/// let queue: Queue<&str> = Queue::new(8)?;
/// let messages = Readiness::new(&queue, Interest::Readable)?;
/// let room = Readiness::new(&queue, Interest::Writable)?; // one for each direction
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// The queue has a message, or is closed and has none in a guard.
    Readable,
    /// The queue has room, or is closed.
    ///
    /// A send may still be refused, if the room is reserved for higher priorities.
    Writable,
}

/// An eventfd.
#[derive(Debug)]
pub(crate) struct EventNotifier(File);

impl EventNotifier {
    pub(crate) fn try_new() -> io::Result<Self> {
        // SAFETY: `eventfd` takes two integers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above returned this descriptor, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }.into()))
    }

    pub(crate) fn signal(&self) {
        // The write fails only if the counter is at its maximum, when the descriptor is readable.
        let _readable = (&self.0).write(&1u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        // The value read does not matter, nor does a failure because the counter is 0.
        let _unreadable = (&self.0).read(&mut [0; size_of::<u64>()]);
    }
}

impl AsFd for EventNotifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
