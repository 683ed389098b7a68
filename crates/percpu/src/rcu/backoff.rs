//! Waiting without a wake-up: readers and holders of a bag's lock wake nothing.

use std::time::Duration;

use crate::sync::{hint, thread};

/// Spins, then yields, then sleeps for growing times.
#[derive(Debug)]
pub(super) struct Backoff {
    step: u32,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { step: 0 }
    }

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
