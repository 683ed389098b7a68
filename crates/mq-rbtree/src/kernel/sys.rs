//! The errno of a system call, and the repetition of interrupted calls.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Repeats a system call until no signal interrupts it. Returns its result, or the errno.
pub(super) fn uninterrupted(mut call: impl FnMut() -> isize) -> Result<usize, i32> {
    loop {
        match result(call()) {
            Err(libc::EINTR) => {}
            done => return done,
        }
    }
}

/// Returns the result of the system call that has just returned, or its errno.
pub(super) fn result(returned: impl TryInto<usize>) -> Result<usize, i32> {
    let errno = |_| io::Error::last_os_error().raw_os_error().unwrap_or_default();
    returned.try_into().map_err(errno)
}

/// Takes ownership of the descriptor that a system call has just made, or returns its errno. On
/// Linux a queue is a file descriptor, and `mq_close` is `close`.
pub(super) fn into_fd(made: RawFd) -> Result<OwnedFd, i32> {
    result(made)?;
    // SAFETY: the system call has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}
