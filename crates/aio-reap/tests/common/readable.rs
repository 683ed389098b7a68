//! What an event loop sees of an engine.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// Whether a loop that sleeps on the descriptor would wake up within `timeout`.
pub(crate) fn readable(fd: impl AsFd, timeout: Duration) -> bool {
    let fd = fd.as_fd().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) > 0 }
}
