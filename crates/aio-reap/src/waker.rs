//! What ends the sleep of a [`block_on`](crate::Engine::block_on), from any thread.

use std::os::fd::OwnedFd;
use std::task::{Wake, Waker};

use percpu::sync::Arc;
use percpu::sync::atomic::{AtomicBool, Ordering};

use crate::sys;

/// Wakes a `block_on` from any thread.
pub(crate) struct BlockOnWaker {
    woken: AtomicBool,
    kick: Arc<OwnedFd>,
}

impl BlockOnWaker {
    /// Rung already: the first poll needs no wake-up.
    pub(crate) fn new(kick: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { woken: AtomicBool::new(true), kick })
    }

    pub(crate) fn handle(waker: &Arc<Self>) -> Waker {
        Waker::from(std::sync::Arc::new(WakerHandle(Arc::clone(waker))))
    }

    /// Takes note of a ring; true if there was one.
    pub(crate) fn take(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `wake`; it carries whatever the waking thread
        // wrote before it woke us.
        self.woken.swap(false, Ordering::Acquire)
    }

    fn wake(&self) {
        // Ordering: Release pairs with the Acquire in `take`; it carries the waker's writes.
        // The flag is set before the eventfd, so whoever is woken by the eventfd sees it.
        if !self.woken.swap(true, Ordering::Release) {
            sys::signal(&self.kick);
        }
    }

    pub(crate) fn is_woken(&self) -> bool {
        // Ordering: Relaxed; `take` acquires before anybody acts on it.
        self.woken.load(Ordering::Relaxed)
    }
}

/// `Wake` wants std's `Arc`, whatever the facade's is.
struct WakerHandle(Arc<BlockOnWaker>);

impl Wake for WakerHandle {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.wake();
    }

    fn wake_by_ref(self: &std::sync::Arc<Self>) {
        self.0.wake();
    }
}
