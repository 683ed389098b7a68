//! Waiting without a wake-up: readers and holders of a bag's lock wake nothing.

use std::time::Duration;

use crate::sync::{hint, thread};

/// Spins, then yields, then sleeps for growing times.
#[derive(Debug)]
pub(super) struct Patience {
    rounds: u32,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self { rounds: 0 }
    }

    pub(super) fn wait(&mut self) {
        self.rounds = self.rounds.saturating_add(1);
        if cfg!(any(offlock_loom, offlock_shuttle)) {
            return thread::yield_now();
        }
        match self.rounds {
            0..32 => hint::spin_loop(),
            32..64 => thread::yield_now(),
            // From 1 us to 1 ms.
            rounds => sleep(Duration::from_micros(1 << ((rounds - 64) / 4).min(10))),
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
