//! The view of an engine from an event loop.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// Returns whether a loop that sleeps on the descriptor wakes up within `timeout`.
pub(crate) fn readable(fd: impl AsFd, timeout: Duration) -> bool {
    let fd = fd.as_fd().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one valid pollfd.
    unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) > 0 }
}
