//! The view of an engine from an event loop.
#![allow(dead_code, reason = "not every program uses both")]

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use aio_reap::Engine;

/// Returns whether a loop that sleeps on the descriptor wakes up within `timeout`.
pub(crate) fn readable(fd: impl AsFd, timeout: Duration) -> bool {
    let fd = fd.as_fd().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one valid pollfd.
    unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) > 0 }
}

/// Checks that the descriptor of an idle engine does not stay readable. A notification may come after its
/// completion was reaped, so it may take a few turns.
pub(crate) fn assert_quiet(engine: &Engine, fd: impl AsFd + Copy) {
    let is_quiet = (0..100).any(|_| {
        engine.turn();
        !readable(fd, Duration::from_millis(1))
    });
    assert!(is_quiet, "an idle engine keeps its descriptor readable");
}
