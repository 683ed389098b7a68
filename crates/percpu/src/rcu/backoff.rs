//! Waiting by polling.
//!
//! A reader that leaves and a thread that unlocks a bag wake no waiter, so waiters poll.

use std::time::Duration;

use crate::sync::{hint, thread};

/// The state of one wait: spins first, then yields, then sleeps for growing times.
#[derive(Debug)]
pub(super) struct Backoff {
    step: u32,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { step: 0 }
    }

    /// Pauses the calling thread, longer with each call, for at most 1 ms.
    pub(super) fn wait(&mut self) {
        self.step = self.step.saturating_add(1);
        if cfg!(any(offlock_loom, offlock_shuttle)) {
            return thread::yield_now();
        }
        match self.step {
            0..32 => hint::spin_loop(),
            32..64 => thread::yield_now(),
            // From 1 us to 1 ms.
            step => sleep(Duration::from_micros(1 << ((step - 64) / 4).min(10))),
        }
    }
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
fn sleep(time: Duration) {
    thread::sleep(time);
}

#[cfg(any(offlock_loom, offlock_shuttle))]
fn sleep(_: Duration) {
    thread::yield_now();
}
