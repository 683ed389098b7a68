//! A waker that counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Wake, Waker};

/// How often its waker was called.
#[derive(Default)]
pub(crate) struct Flag(AtomicUsize);

impl Flag {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(SeqCst)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}
