//! Event notifiers: descriptors by which one thread ends another's wait.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Adds one to an eventfd; it can only fail by being full, and then it is readable anyway.
pub(crate) fn ring(eventfd: &OwnedFd) {
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

/// A new eventfd.
pub(crate) fn eventfd() -> io::Result<Arc<OwnedFd>> {
    use rustix::event::EventfdFlags;
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(Arc::new(rustix::event::eventfd(0, flags)?))
}
