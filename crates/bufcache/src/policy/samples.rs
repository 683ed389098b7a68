//! Hits of sampled blocks, on their way from the threads to the shadows.
//!
//! A ring per record of `hazard`, which one thread has at a time. A hit adds the block's tag with two plain
//! loads and two plain stores to memory of its thread, and drops it if the ring is full. The ring is at least as
//! long as a shadow has blocks: a shorter one loses most of a long run of hits, and shadows that miss the hits
//! of the rule in force favour the others.
//!
//! # Invariants
//!
//! 1. The tags from `tail` to `head` belong to the thread that drains, the others to the owner of the ring.
//! 2. One thread at a time drains: it has the lock of the shadows.

use percpu::AllocError;
use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::{load_own, order};

use crate::word::Key;

/// Rings: as many threads' hits are sampled. A guess.
const RINGS: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 64 };
/// Most hits that one miss takes from a ring: it has another 4 us to wait then.
const MOST: u32 = 32;

#[derive(Debug)]
pub(crate) struct Samples {
    /// A block is sampled if 32 bits of its hash are below this. For hits it is 0 until the cache is full: what
    /// never evicts has nothing to learn. A plain atomic, which no model explores: any value of it will do.
    share: std::sync::atomic::AtomicU32,
    /// The share of misses until then.
    planned: u32,
    /// Rings that were ever used. As `share`.
    used: std::sync::atomic::AtomicU32,
    rings: Box<[Ring]>,
}

#[derive(Debug)]
#[repr(align(128))]
struct Ring {
    head: AtomicU32,
    tail: AtomicU32,
    tags: Box<[UnsafeCell<u32>]>,
}

// SAFETY: invariant 1 says which thread has which tag; all else is atomics.
unsafe impl Sync for Ring {}

impl Samples {
    /// Samples `blocks` of `units` blocks; none: nothing is sampled.
    pub(crate) fn new(blocks: usize, units: usize) -> Result<Self, AllocError> {
        let mut rings = Vec::new();
        let count = if blocks == 0 { 0 } else { RINGS };
        // A power of two: `head` and `tail` wrap at one, and the place of a tag must not jump there.
        let places = blocks.next_power_of_two();
        rings.try_reserve_exact(count).map_err(|_| AllocError::new())?;
        for _ in 0..count {
            let mut tags = Vec::new();
            tags.try_reserve_exact(places).map_err(|_| AllocError::new())?;
            tags.extend((0..places).map(|_| UnsafeCell::new(0)));
            let [head, tail] = [0; 2].map(AtomicU32::new);
            rings.push(Ring { head, tail, tags: tags.into() });
        }
        let planned = (blocks as f64 / units as f64 * f64::from(u32::MAX)) as u32;
        // A model sees no change of `used`.
        let used = if cfg!(any(offlock_loom, offlock_shuttle)) { count as u32 } else { 0 };
        let [share, used] = [0, used].map(std::sync::atomic::AtomicU32::new);
        Ok(Self { share, planned, used, rings: rings.into() })
    }

    /// Samples hits from now on, of `factor` times as many blocks as planned.
    pub(crate) fn open(&self, factor: f64) {
        self.share.store((f64::from(self.planned) * factor) as u32, Ordering::Relaxed); // a hint
    }

    /// Whether hits of a block are for the shadows.
    pub(crate) fn takes_hit(&self, key: Key) -> bool {
        Self::bits(key) < self.share.load(Ordering::Relaxed) // a hint
    }

    /// Whether a miss of a block is for them.
    pub(crate) fn takes_miss(&self, key: Key) -> bool {
        Self::bits(key) < self.share.load(Ordering::Relaxed).max(self.planned) // a hint
    }

    /// Bits that neither choose the bucket of the table nor the tag.
    fn bits(key: Key) -> u32 {
        (key.hash() >> 8) as u32
    }

    /// What is known of a sampled block: the half of its hash that the sample says nothing about.
    pub(crate) fn tag(key: Key) -> u32 {
        (key.hash() >> 32) as u32
    }

    /// Leaves a hit to the shadows, in the ring of that number, which is the calling thread's; drops it if there
    /// is no such ring, or no room in it. Wait-free.
    pub(crate) fn add(&self, ring: u32, tag: u32) {
        let Some(Ring { head, tail, tags }) = self.rings.get(ring as usize) else { return };
        let at = load_own(head);
        // Ordering: Acquire pairs with the Release in `drain`; it carries the reads of the tags before `tail`,
        // whose places are this thread's again.
        let acquire = order!(Acquire, "add: the tag there was read");
        if at.wrapping_sub(tail.load(acquire)) as usize == tags.len() {
            return;
        }
        if self.used.load(Ordering::Relaxed) <= ring {
            self.used.fetch_max(ring + 1, Ordering::Relaxed); // once per thread
        }
        // SAFETY: invariant 1; the place is not between `tail` and `head`.
        tags[at as usize % tags.len()].with_mut(|place| unsafe { place.write(tag) });
        // Ordering: Release pairs with the Acquire in `drain`; it carries the tag.
        head.store(at.wrapping_add(1), order!(Release, "add: the tag is written"));
    }

    /// Takes some of the hits of each ring. The caller has the lock of the shadows (invariant 2).
    pub(crate) fn drain(&self, mut take: impl FnMut(u32)) {
        let used = self.used.load(Ordering::Relaxed) as usize; // a hint
        for Ring { head, tail, tags } in &self.rings[..used] {
            let from = load_own(tail);
            // Ordering: Acquire pairs with the Release in `add`; it carries the tags.
            let there = head.load(order!(Acquire, "drain: the tag is written")).wrapping_sub(from);
            let to = from.wrapping_add(there.min(MOST));
            let mut at = from;
            while at != to {
                // SAFETY: invariant 1; the place is between `tail` and `head`.
                take(tags[at as usize % tags.len()].with(|place| unsafe { place.read() }));
                at = at.wrapping_add(1);
            }
            // Ordering: Release pairs with the Acquire in `add`; it carries the reads of the tags.
            tail.store(to, order!(Release, "drain: the tag was read"));
        }
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn inv27_tags_stay_in_order_where_the_counts_wrap() {
        let samples = Samples::new(20, 200).unwrap();
        let Ring { head, tail, .. } = &samples.rings[0];
        let first = u32::MAX - 4;
        [head, tail].into_iter().for_each(|count| count.store(first, Ordering::Relaxed));
        (1..=20).for_each(|tag| samples.add(0, tag));
        let mut tags = Vec::new();
        samples.drain(|tag| tags.push(tag));
        assert!(tags.into_iter().eq(1..=20));
    }
}
