//! The waker of [`block_on`](crate::Engine::block_on), usable from any thread.

use std::os::fd::OwnedFd;
use std::task::{Wake, Waker};

use percpu::sync::atomic::{AtomicBool, Ordering};
use percpu::sync::{Arc, order};

use crate::sys;

/// Whether a future was woken since it was last polled.
#[derive(Debug)]
pub struct WokenFlag(AtomicBool);

impl WokenFlag {
    /// Makes a flag that is set, because the first poll needs no wake-up.
    #[expect(clippy::new_without_default, reason = "a default flag would be clear")]
    pub fn new() -> Self {
        Self(AtomicBool::new(true))
    }

    /// Resets the flag. Returns whether it was set.
    pub fn take(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `set`; it carries the writes of the waking
        // thread before the wake-up.
        self.0.swap(false, order!(Acquire, "take: the waking thread has written"))
    }

    /// Sets the flag. Returns whether it was clear; the caller must then signal the kick.
    #[must_use = "the engine may be asleep"]
    pub fn set(&self) -> bool {
        // Ordering: Release pairs with the Acquire in `take`; it carries the writes of the waking
        // thread. The flag is set before the eventfd is signalled, so the thread that the eventfd
        // wakes sees the flag.
        !self.0.swap(true, order!(Release, "set: the waking thread has written"))
    }

    /// Returns whether the flag is set.
    pub fn is_set(&self) -> bool {
        // Ordering: Relaxed; a hint that ends the sleep. `take` acquires before the future is
        // polled.
        self.0.load(Ordering::Relaxed)
    }
}

/// Wakes a `block_on` from any thread: a flag and the engine's kick.
pub(crate) struct BlockOnWaker {
    pub(crate) woken: WokenFlag,
    kick: Arc<OwnedFd>,
}

impl BlockOnWaker {
    pub(crate) fn new(kick: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { woken: WokenFlag::new(), kick })
    }

    pub(crate) fn handle(waker: &Arc<Self>) -> Waker {
        Waker::from(std::sync::Arc::new(WakerHandle(Arc::clone(waker))))
    }

    fn wake(&self) {
        if self.woken.set() {
            sys::signal(&self.kick);
        }
    }

    pub(crate) fn is_woken(&self) -> bool {
        self.woken.is_set()
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
