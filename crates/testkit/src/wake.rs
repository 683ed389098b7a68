//! A waker that counts its calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Wake, Waker};

/// The number of times that its wakers were called.
#[derive(Debug, Default)]
pub struct WakeCount(AtomicUsize);

impl WakeCount {
    /// Begins at zero.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns a waker that adds one.
    pub fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }

    /// Returns how often a waker was called.
    pub fn count(&self) -> usize {
        // Ordering: SeqCst, like the add in `wake`: the tests that compare it with other flags
        // need a single order.
        self.0.load(SeqCst)
    }
}

impl Wake for WakeCount {
    fn wake(self: Arc<Self>) {
        // Ordering: SeqCst, with the load in `count`.
        self.0.fetch_add(1, SeqCst);
    }
}
