//! Hits of sampled blocks, on their way from the threads to the shadows.
//!
//! There is a ring for each of the first hazard records, which one thread owns at a time. A hit adds
//! the block's tag by two plain loads and two plain stores to memory of its thread, and drops it if
//! the ring is full. Threads with other records share a few more rings: the one that gets the lock
//! of its ring adds its tag, another one drops it. A ring has at least as many places as a shadow has
//! blocks: a shorter one loses most of a long run of hits, and shadows that miss the hits of the rule
//! in force favour the other rules.
//!
//! # Invariants
//!
//! 1. The tags from `tail` to `head` belong to the thread that drains, the others to the owner of
//!    the ring, or to the thread that has the ring's lock.
//! 2. One thread at a time drains, because draining needs the lock of the shadows.

use offlock_percpu::AllocError;
use offlock_sync::atomic::{AtomicU32, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{WordLock, load_own, order};

use crate::word::Key;

/// The number of rings with an owner. A guess.
const RINGS: usize = if cfg!(offlock_model) { 1 } else { 64 };
/// The number of rings that other threads share. A guess.
const SHARED: usize = if cfg!(offlock_model) { 0 } else { 8 };
/// The most hits that one miss takes from the rings. They delay the miss by 4 us.
const MOST: u32 = 32;

/// The rings of a cache, and the share of the blocks that is sampled.
#[derive(Debug)]
pub(crate) struct Samples {
    /// A block is sampled if 32 bits of its hash are below this. 0 for hits until the cache is
    /// full, because a cache that never evicts has nothing to learn. An atomic of `std`, which no
    /// model explores: any value is correct.
    share: std::sync::atomic::AtomicU32,
    /// The share of misses until the cache is full.
    planned: u32,
    /// The number of rings used so far. An atomic of `std`, like `share`.
    used: std::sync::atomic::AtomicU32,
    /// The ring from which the next miss takes hits first. An atomic of `std`, like `share`.
    next: std::sync::atomic::AtomicU32,
    rings: Box<[Ring]>,
    /// The locks of the last rings, which are shared.
    locks: Box<[WordLock<()>]>,
}

#[derive(Debug)]
#[repr(align(128))]
struct Ring {
    head: AtomicU32,
    tail: AtomicU32,
    tags: Box<[UnsafeCell<u32>]>,
}

// SAFETY: invariant 1 gives each tag to one thread at a time; the other fields are atomics.
unsafe impl Sync for Ring {}

impl Samples {
    /// Samples `blocks` of the blocks of `buffers` buffers; with 0, nothing is sampled.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the rings.
    pub(crate) fn new(blocks: usize, buffers: usize) -> Result<Self, AllocError> {
        let mut rings = Vec::new();
        let shared = if blocks == 0 { 0 } else { SHARED };
        let count = if blocks == 0 { 0 } else { RINGS + SHARED };
        // A power of two, because `head` and `tail` wrap at 2^32 and `head % places` must not jump
        // there.
        let places = blocks.next_power_of_two();
        rings.try_reserve_exact(count).map_err(|_| AllocError::new())?;
        for _ in 0..count {
            let mut tags = Vec::new();
            tags.try_reserve_exact(places).map_err(|_| AllocError::new())?;
            tags.extend((0..places).map(|_| UnsafeCell::new(0)));
            let [head, tail] = [0; 2].map(AtomicU32::new);
            rings.push(Ring { head, tail, tags: tags.into() });
        }
        let planned = (blocks as f64 / buffers as f64 * f64::from(u32::MAX)) as u32;
        // A model does not explore `used`, so all rings count as used there.
        let used = if cfg!(offlock_model) { count as u32 } else { 0 };
        let [share, used, next] = [0, used, 0].map(std::sync::atomic::AtomicU32::new);
        let locks = (0..shared).map(|_| WordLock::new(())).collect();
        Ok(Self { share, planned, used, next, rings: rings.into(), locks })
    }

    /// Samples the hits and misses of a share of the blocks, which is at least the planned one.
    pub(crate) fn open(&self, share: f64) {
        self.share.store((share * f64::from(u32::MAX)) as u32, Ordering::Relaxed); // a hint
    }

    /// Returns whether hits of a block are passed to the shadows.
    pub(crate) fn takes_hit(&self, key: Key) -> bool {
        Self::bits(key) < self.share.load(Ordering::Relaxed) // a hint
    }

    /// Returns whether misses of a block are passed to the shadows.
    pub(crate) fn takes_miss(&self, key: Key) -> bool {
        Self::bits(key) < self.share.load(Ordering::Relaxed).max(self.planned) // a hint
    }

    /// Returns bits of the hash that choose neither the bucket of the table nor the tag.
    fn bits(key: Key) -> u32 {
        (key.hash() >> 8) as u32
    }

    /// Returns the tag of a block: the half of its hash that does not decide whether it is sampled.
    pub(crate) fn tag(key: Key) -> u32 {
        (key.hash() >> 32) as u32
    }

    /// Adds a hit of the thread with that hazard record to its ring. Drops the hit if there is no
    /// room, or if another thread adds to a shared ring. Wait-free.
    pub(crate) fn add(&self, record: u32, tag: u32) {
        let owned = (self.rings.len() - self.locks.len()) as u32;
        if record < owned {
            return self.push(record, tag);
        }
        let Some(at) = record.checked_rem(self.locks.len() as u32) else { return };
        if let Some(_lock) = self.locks[at as usize].try_lock() {
            self.push(owned + at, tag);
        }
    }

    /// Adds a hit to a ring that is the calling thread's, or that it has locked.
    fn push(&self, ring: u32, tag: u32) {
        let Ring { head, tail, tags } = &self.rings[ring as usize];
        let at = load_own(head);
        // Ordering: Acquire pairs with the Release in `drain`; the write below comes after the read
        // of the tag that was at this place.
        let acquire = order!(Acquire, "add: the tag there was read");
        if at.wrapping_sub(tail.load(acquire)) as usize == tags.len() {
            return;
        }
        if self.used.load(Ordering::Relaxed) <= ring {
            // Ordering: Relaxed; a hint. Once per thread.
            self.used.fetch_max(ring + 1, Ordering::Relaxed);
        }
        // SAFETY: the place is not between `tail` and `head`, so it is this thread's (invariant 1).
        tags[at as usize % tags.len()].with_mut(|place| unsafe { place.write(tag) });
        // Ordering: Release pairs with the Acquire in `drain`; it carries the tag.
        head.store(at.wrapping_add(1), order!(Release, "add: the tag is written"));
    }

    /// Takes some of the hits, from another ring first each time. The caller has the lock of the
    /// shadows (invariant 2).
    pub(crate) fn drain(&self, mut take: impl FnMut(u32)) {
        let used = self.used.load(Ordering::Relaxed) as usize; // a hint
        // Ordering: Relaxed; a hint.
        let first = self.next.fetch_add(1, Ordering::Relaxed) as usize % used.max(1);
        let (before, after) = self.rings[..used].split_at(first);
        let mut left = MOST;
        for Ring { head, tail, tags } in after.iter().chain(before) {
            if left == 0 {
                break;
            }
            let from = load_own(tail);
            // Ordering: Acquire pairs with the Release in `push`; it carries the tags.
            let there = head.load(order!(Acquire, "drain: the tag is written")).wrapping_sub(from);
            let taken = there.min(left);
            left -= taken;
            let to = from.wrapping_add(taken);
            let mut at = from;
            while at != to {
                // SAFETY: the place is between `tail` and `head`, so it is this thread's (invariant
                // 1).
                take(tags[at as usize % tags.len()].with(|place| unsafe { place.read() }));
                at = at.wrapping_add(1);
            }
            // Ordering: Release pairs with the Acquire in `push`; the reads of the tags come before
            // it.
            tail.store(to, order!(Release, "drain: the tag was read"));
        }
    }
}

#[cfg(all(test, not(offlock_model)))]
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

    #[test]
    fn threads_beyond_the_rings_share_some_and_one_miss_takes_few_hits() {
        let samples = Samples::new(32, 320).unwrap();
        let records = [0, 5, RINGS as u32 - 1, RINGS as u32, 1001];
        for record in records {
            (0..32).for_each(|tag| samples.add(record, 100 * record + tag));
        }
        let drained = || {
            let mut tags = Vec::new();
            samples.drain(|tag| tags.push(tag));
            tags
        };
        let mut all = Vec::new();
        for _ in records {
            let tags = drained();
            assert_eq!(tags.len(), MOST as usize);
            all.extend(tags);
        }
        assert!(drained().is_empty());
        all.sort_unstable();
        assert!(
            all.into_iter()
                .eq(records.iter().flat_map(|at| (0..32).map(move |tag| 100 * at + tag)))
        );
    }
}
