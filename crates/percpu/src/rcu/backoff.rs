//! Waiting by polling.
//!
//! A reader that leaves and a thread that unlocks a bag wake no waiter, so waiters poll.

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
use std::time::Duration;

use crate::sync::thread;

/// The state of one wait: spins and yields first, then sleeps for growing times.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    spins: crossbeam_utils::Backoff,
    sleeps: u32,
}

impl Backoff {
    /// Pauses the calling thread, longer with each call, for at most 1 ms.
    #[cfg(not(any(offlock_loom, offlock_shuttle)))]
    pub(super) fn wait(&mut self) {
        if !self.spins.is_completed() {
            return self.spins.snooze();
        }
        self.sleeps = self.sleeps.saturating_add(1);
        // From 1 us to 1 ms.
        thread::sleep(Duration::from_micros(1 << (self.sleeps / 4).min(10)));
    }

    /// Lets another thread of the model run.
    #[cfg(any(offlock_loom, offlock_shuttle))]
    pub(super) fn wait(&mut self) {
        thread::yield_now();
    }
}
