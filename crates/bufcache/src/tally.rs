//! Counts of hits: each thread counts in a word of its own, by a load and a store.
//!
//! A word belongs to the hazard record with its number, and so to the thread that owns the record.
//! Records with numbers from `WORDS` on have no word; the caller counts their hits elsewhere.

use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::load_own;

/// The number of words. A guess: more than the CPUs of most machines, for 8 KiB of each cache.
const WORDS: usize = if cfg!(offlock_model) { 2 } else { 64 };

#[derive(Debug)]
#[repr(align(128))]
struct Word(AtomicU64);

/// The words of a cache.
#[derive(Debug)]
pub(crate) struct Tally(Box<[Word]>);

impl Tally {
    pub(crate) fn new() -> Self {
        Self((0..WORDS).map(|_| Word(AtomicU64::new(0))).collect())
    }

    /// Counts a hit in the word of the record with that number, which this thread owns. Returns
    /// whether the record has a word.
    #[inline(always)]
    pub(crate) fn count(&self, record: u32) -> bool {
        let Some(Word(own)) = self.0.get(record as usize) else { return false };
        // Ordering: Relaxed; a statistic. The exchange on the record's `owner` in `hazard` carries
        // the count of the owner before to this thread.
        own.store(load_own(own) + 1, Ordering::Relaxed);
        true
    }

    /// Returns the sum of all counts.
    pub(crate) fn sum(&self) -> u64 {
        // Ordering: Relaxed; exact for the counts that happened before this call, as after a join.
        self.0.iter().map(|Word(own)| own.load(Ordering::Relaxed)).sum()
    }
}
