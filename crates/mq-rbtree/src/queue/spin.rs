//! How long a thread looks before it sleeps.
//!
//! Putting a thread to sleep and waking it takes tens of microseconds; an answer that comes sooner is
//! worth looking for. Each wait that was over in time lets the next one look twice as long, each in
//! vain half as long, and every few waits the full length is tried again. On one CPU nobody looks: who
//! could answer could not run.

use percpu::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Most looks, each with a pause: about 20 us on processors whose pause takes 20 to 40 ns; a guess.
const MOST: u32 = 1_000;
/// Fewest, once looking was in vain for long.
const LEAST: u32 = 16;
/// One wait of so many looks the full length, whatever the others learnt.
const PROBE: u32 = 64;

pub(crate) struct Spin {
    /// Looks of the next wait; 0: none, ever.
    looks: AtomicU32,
    waits: AtomicU32,
    in_time: AtomicU64,
}

impl Spin {
    pub(crate) fn new(on: bool) -> Self {
        let on = on && !cfg!(any(offlock_loom, offlock_shuttle));
        let looks = AtomicU32::new(if on { MOST } else { 0 });
        Self { looks, waits: AtomicU32::new(0), in_time: AtomicU64::new(0) }
    }

    /// Looks of a wait that begins now.
    pub(crate) fn looks(&self) -> u32 {
        // Ordering: Relaxed, all; numbers that say nothing about other memory.
        let looks = self.looks.load(Ordering::Relaxed);
        if looks == 0 {
            return 0;
        }
        let waits = self.waits.fetch_add(1, Ordering::Relaxed);
        if waits.is_multiple_of(PROBE) { MOST } else { looks }
    }

    /// Learns how a wait went that had looks.
    pub(crate) fn learn(&self, in_time: bool) {
        // Ordering: Relaxed; as above, and a lost step is no harm.
        let looks = self.looks.load(Ordering::Relaxed);
        let next = if in_time { (looks * 2).min(MOST) } else { (looks / 2).max(LEAST) };
        if in_time {
            self.in_time.fetch_add(1, Ordering::Relaxed);
        }
        if looks != 0 && next != looks {
            self.looks.store(next, Ordering::Relaxed);
        }
    }

    /// Waits that were over in time.
    pub(crate) fn in_time(&self) -> u64 {
        // Ordering: Relaxed; as above.
        self.in_time.load(Ordering::Relaxed)
    }
}
