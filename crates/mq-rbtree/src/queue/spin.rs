//! How long a thread spins before it sleeps.
//!
//! Putting a thread to sleep and waking it takes tens of microseconds; an answer that comes sooner is
//! worth looking for. Each wait that was over in time lets the next one look twice as long, each in
//! vain half as long, and every few waits the full length is tried again. On one CPU nobody spins: who
//! could answer could not run.

use percpu::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Most spins, each with a pause: about 20 us on processors whose pause takes 20 to 40 ns; a guess.
const MAX_SPINS: u32 = 1_000;
/// Fewest, once looking was in vain for long.
const MIN_SPINS: u32 = 16;
/// One wait of so many spins the full length, whatever the others learnt.
const PROBE_INTERVAL: u32 = 64;

pub(crate) struct Spin {
    /// Looks of the next wait; 0: none, ever.
    spins: AtomicU32,
    waits: AtomicU32,
    in_time: AtomicU64,
}

impl Spin {
    pub(crate) fn new(on: bool) -> Self {
        let on = on && !cfg!(any(offlock_loom, offlock_shuttle));
        let spins = AtomicU32::new(if on { MAX_SPINS } else { 0 });
        Self { spins, waits: AtomicU32::new(0), in_time: AtomicU64::new(0) }
    }

    /// Looks of a wait that begins now.
    pub(crate) fn spins(&self) -> u32 {
        // Ordering: Relaxed, all; numbers that say nothing about other memory.
        let spins = self.spins.load(Ordering::Relaxed);
        if spins == 0 {
            return 0;
        }
        let waits = self.waits.fetch_add(1, Ordering::Relaxed);
        if waits.is_multiple_of(PROBE_INTERVAL) { MAX_SPINS } else { spins }
    }

    /// Learns how a wait went that had spins.
    pub(crate) fn record(&self, in_time: bool) {
        // Ordering: Relaxed; as above, and a lost step is no harm.
        let spins = self.spins.load(Ordering::Relaxed);
        let next = if in_time { (spins * 2).min(MAX_SPINS) } else { (spins / 2).max(MIN_SPINS) };
        if in_time {
            self.in_time.fetch_add(1, Ordering::Relaxed);
        }
        if spins != 0 && next != spins {
            self.spins.store(next, Ordering::Relaxed);
        }
    }

    /// Waits that were over in time.
    pub(crate) fn in_time(&self) -> u64 {
        // Ordering: Relaxed; as above.
        self.in_time.load(Ordering::Relaxed)
    }
}
