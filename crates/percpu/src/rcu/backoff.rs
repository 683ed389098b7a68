//! Waiting by polling.
//!
//! A reader that leaves and a thread that unlocks a bag wake no waiter, so waiters poll.

use std::time::Duration;

use offlock_sync::thread;

/// The state of one wait: spins and yields first, then sleeps for growing times.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    spins: crossbeam_utils::Backoff,
    sleeps: u32,
}

impl Backoff {
    /// Pauses the calling thread, longer with each call, for at most 1 ms.
    pub(super) fn wait(&mut self) {
        if cfg!(offlock_model) {
            return thread::yield_now(); // another thread of the model runs
        }
        if !self.spins.is_completed() {
            return self.spins.snooze();
        }
        self.sleeps = self.sleeps.saturating_add(1);
        // From 1 us to 1 ms.
        std::thread::sleep(Duration::from_micros(1 << (self.sleeps / 4).min(10)));
    }
}
