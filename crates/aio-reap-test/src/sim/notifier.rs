//! The descriptor that a device makes readable when completions are visible.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

/// A non-blocking eventfd.
#[derive(Debug)]
pub(crate) struct Notifier(File);

impl Notifier {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the call takes no pointer.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this descriptor, so it has no other owner.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes it readable. The write fails only if the count is at its limit, where it is readable.
    pub(crate) fn signal(&self) {
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Empties it. The read fails if it is empty.
    pub(crate) fn drain(&self) {
        let _ = (&self.0).read(&mut [0; 8]);
    }
}
