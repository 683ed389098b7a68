//! A file descriptor that other threads make readable.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

pub(crate) const READABLE: usize = 0;
pub(crate) const WRITABLE: usize = 1;

/// An eventfd.
#[derive(Debug)]
pub(crate) struct EventNotifier(OwnedFd);

impl EventNotifier {
    pub(crate) fn try_new() -> io::Result<Self> {
        // SAFETY: `eventfd` takes two integers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above returned this descriptor, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn signal(&self) {
        let one = 1u64;
        // The write fails only if the counter is at its maximum, when the descriptor is readable.
        // SAFETY: the pointer is to 8 bytes that live during the call.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }

    pub(crate) fn clear(&self) {
        let mut count = 0u64;
        // The value read does not matter, nor does a failure because the counter is 0.
        // SAFETY: the pointer is to 8 bytes that live during the call.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) };
    }
}

impl AsFd for EventNotifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
