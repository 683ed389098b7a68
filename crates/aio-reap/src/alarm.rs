//! What ends the sleep of a [`block_on`](crate::Engine::block_on), from any thread.

use std::os::fd::OwnedFd;
use std::task::{Wake, Waker};

use percpu::sync::Arc;
use percpu::sync::atomic::{AtomicBool, Ordering};

use crate::sys;

/// Wakes a `block_on` from any thread.
pub(crate) struct Alarm {
    rung: AtomicBool,
    kick: Arc<OwnedFd>,
}

impl Alarm {
    /// Rung already: the first poll needs no wake-up.
    pub(crate) fn new(kick: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { rung: AtomicBool::new(true), kick })
    }

    pub(crate) fn waker(alarm: &Arc<Self>) -> Waker {
        Waker::from(std::sync::Arc::new(AlarmWaker(Arc::clone(alarm))))
    }

    /// Takes note of a ring; true if there was one.
    pub(crate) fn answer(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `ring`; it carries whatever the waking thread
        // wrote before it woke us.
        self.rung.swap(false, Ordering::Acquire)
    }

    fn ring(&self) {
        // Ordering: Release pairs with the Acquire in `answer`; it carries the waker's writes.
        // The flag is set before the eventfd, so whoever is woken by the eventfd sees it.
        if !self.rung.swap(true, Ordering::Release) {
            sys::signal(&self.kick);
        }
    }

    pub(crate) fn is_rung(&self) -> bool {
        // Ordering: Relaxed; `answer` acquires before anybody acts on it.
        self.rung.load(Ordering::Relaxed)
    }
}

/// `Wake` wants std's `Arc`, whatever the facade's is.
struct AlarmWaker(Arc<Alarm>);

impl Wake for AlarmWaker {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.ring();
    }

    fn wake_by_ref(self: &std::sync::Arc<Self>) {
        self.0.ring();
    }
}
