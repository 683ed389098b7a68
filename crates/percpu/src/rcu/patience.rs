//! How this module waits, where it waits at all.

use std::time::Duration;

use super::{Forked, fork};
use crate::sync::{hint, thread};

/// Spins, then yields, then sleeps; and stops in a fork child that nobody prepared.
#[derive(Debug)]
pub(super) struct Patience {
    rounds: u32,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self { rounds: 0 }
    }

    pub(super) fn wait(&mut self) -> Result<(), Forked> {
        self.rounds = self.rounds.saturating_add(1);
        if cfg!(any(offlock_loom, offlock_shuttle)) {
            thread::yield_now();
            return Ok(());
        }
        match self.rounds {
            0..32 => hint::spin_loop(),
            32..64 => thread::yield_now(),
            rounds => {
                if fork::is_unprepared() {
                    return Err(Forked::new());
                }
                // From 1 us to 1 ms: readers do not wake anybody.
                fork::sleep(Duration::from_micros(1 << ((rounds - 64) / 4).min(10)));
            }
        }
        Ok(())
    }
}
