//! The waker of [`block_on`](crate::Engine::block_on), usable from any thread.

use std::os::fd::OwnedFd;
use std::task::{Wake, Waker};

use percpu::sync::Arc;
use percpu::sync::atomic::{AtomicBool, Ordering};

use crate::sys;

/// Wakes a `block_on` from any thread: a flag and the engine's kick.
pub(crate) struct BlockOnWaker {
    woken: AtomicBool,
    kick: Arc<OwnedFd>,
}

impl BlockOnWaker {
    /// Makes a waker that is woken already, because the first poll needs no wake-up.
    pub(crate) fn new(kick: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { woken: AtomicBool::new(true), kick })
    }

    pub(crate) fn handle(waker: &Arc<Self>) -> Waker {
        Waker::from(std::sync::Arc::new(WakerHandle(Arc::clone(waker))))
    }

    /// Resets the flag. Returns whether it was set.
    pub(crate) fn take(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `wake`; it carries the writes of the waking
        // thread before the wake-up.
        self.woken.swap(false, Ordering::Acquire)
    }

    fn wake(&self) {
        // Ordering: Release pairs with the Acquire in `take`; it carries the writes of the waking
        // thread. The flag is set before the eventfd is signalled, so the thread that the eventfd
        // wakes sees the flag.
        if !self.woken.swap(true, Ordering::Release) {
            sys::signal(&self.kick);
        }
    }

    pub(crate) fn is_woken(&self) -> bool {
        // Ordering: Relaxed; a hint that ends the sleep. `take` acquires before the future is
        // polled.
        self.woken.load(Ordering::Relaxed)
    }
}

/// The implementation of `Wake`, which needs std's `Arc` even if the facade has another one.
struct WakerHandle(Arc<BlockOnWaker>);

impl Wake for WakerHandle {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.wake();
    }

    fn wake_by_ref(self: &std::sync::Arc<Self>) {
        self.0.wake();
    }
}
