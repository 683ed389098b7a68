//! Hits, counted by each thread in a word of its own: a plain load and a store.
//!
//! A word belongs to a record of `hazard`, by its number, and so to the thread that has the record.
//! Records of high numbers, of which there are some only where as many threads had guards at once,
//! have no word; their hits are counted elsewhere.

use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::load_own;

/// Words. A guess: more threads than CPUs run at once on most machines, and 8 KiB of a cache.
const WORDS: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 64 };

#[derive(Debug)]
#[repr(align(128))]
struct Word(AtomicU64);

#[derive(Debug)]
pub(crate) struct Tally(Box<[Word]>);

impl Tally {
    pub(crate) fn new() -> Self {
        Self((0..WORDS).map(|_| Word(AtomicU64::new(0))).collect())
    }

    /// Counts one, if there is a word for the record with that number, which is this thread's. Returns how
    /// many it has then.
    #[inline(always)]
    pub(crate) fn count(&self, record: u32) -> Option<u64> {
        let Word(own) = self.0.get(record as usize)?;
        // Ordering: Relaxed; a statistic. Whoever had the record before has stored no later than when it
        // gave the record back, which `hazard` carries to this thread.
        let count = load_own(own) + 1;
        own.store(count, Ordering::Relaxed);
        Some(count)
    }

    /// All that was counted.
    pub(crate) fn sum(&self) -> u64 {
        // Ordering: Relaxed; exact for what happened before, as after a join.
        self.0.iter().map(|Word(own)| own.load(Ordering::Relaxed)).sum()
    }
}
