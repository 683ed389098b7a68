//! Event notifiers: eventfds with which one thread ends another's wait. A module of its own,
//! because the main thread, the workers, the limits and the metrics use it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Wake, Waker};

/// Adds one to an eventfd. Fails only if its count is at the maximum, and then it is readable
/// already.
pub(crate) fn notify(eventfd: &OwnedFd) {
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

/// Makes an eventfd with the count 0.
pub(crate) fn eventfd() -> io::Result<Arc<OwnedFd>> {
    use rustix::event::EventfdFlags;
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(Arc::new(rustix::event::eventfd(0, flags)?))
}

/// Returns a waker that [notifies](notify) an eventfd.
pub(crate) fn waker(eventfd: &Arc<OwnedFd>) -> Waker {
    Arc::new(NotifierWaker(Arc::clone(eventfd))).into()
}

struct NotifierWaker(Arc<OwnedFd>);

impl Wake for NotifierWaker {
    fn wake(self: Arc<Self>) {
        notify(&self.0);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        notify(&self.0);
    }
}
