//! The sampling of an adaptive cache: passes sampled requests to the shadows of its policy.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::Shared;
use crate::frames::Frame;
use crate::frames::Place;
use crate::hazard;
use crate::policy::Samples;
use crate::word::{Key, NEW, SAMPLED, Word};

/// The parts in which the table is scanned once the cache is full. A guess: fewer than the sampled
/// misses that fill a shadow, and 10 us for each part of a table of a million entries.
const STEPS: u32 = 128;

impl Shared {
    /// Returns the word of a block that is about to be loaded into that frame, for
    /// [`admit`](Self::admit).
    pub(super) fn loading(&self, frame: Frame, key: Key) -> Word {
        // Most misses begin on probation, so the policy need not set `NEW`.
        Word::loading(frame).sampled_if(self.samples.takes_hit(key)).with(NEW)
    }

    /// Passes a hit of a block whose word says `SAMPLED` to the shadows, if the block is in the
    /// sample. Does not write to shared memory.
    #[cold]
    pub(crate) fn note_hit(&self, key: Key) {
        if !self.samples.takes_hit(key) {
            return;
        }
        if let Some(record) = hazard::number() {
            self.samples.add(record, Samples::tag(key));
        }
    }

    pub(crate) fn is_sampled(&self, key: Key) -> bool {
        self.table.find(key).is_some_and(|entry| entry.word().has(SAMPLED))
    }

    /// If the block is in the sample, passes the hits in the rings and this miss to the shadows. If
    /// another thread has their lock, this miss is lost. `is_full` tells whether the cache is full.
    pub(super) fn note_miss(&self, key: Key, is_full: bool) {
        if !self.samples.takes_miss(key) {
            return;
        }
        let Some(mut shadows) = self.shadows.try_lock() else { return };
        let Some(shadows) = shadows.as_mut() else { return };
        let mut changes = false;
        self.samples.drain(|tag| changes |= shadows.request(tag, true));
        changes |= shadows.request(Samples::tag(key), false);
        if is_full && shadows.is_due {
            let blocks = self.cold.lock().policy.len();
            if let Some(share) = shadows.settle(blocks) {
                self.samples.open(share);
                shadows.unmarked = 0..self.table.places();
                changes = true;
            }
        } else if is_full && shadows.unmarked.is_empty() {
            shadows.follow(self.table.sampled());
        }
        self.mark_some(&mut shadows.unmarked);
        // Also while the cache is not full, as after it grows, because a change is reported once.
        if changes && shadows.is_settled() {
            self.cold.lock().policy.set_rule(shadows.rule());
            self.is_selective.store(shadows.is_selective(), Ordering::Relaxed); // a hint
        }
    }

    /// Returns whether a block that is not cached is worth a buffer, for a caller that can do
    /// without. While few requests hit, a block is if it was evicted from probation or refused
    /// lately, or if there is room.
    pub(super) fn is_worth_a_buffer(&self, key: Key) -> bool {
        if !self.is_selective.load(Ordering::Relaxed) {
            return true;
        }
        let mut cold = self.cold.lock();
        let is_worth = cold.has_room() || cold.policy.knows(key);
        drop(cold);
        if !is_worth {
            self.counters.claims_refused.add(1);
            self.note_miss(key, true);
        }
        is_worth
    }

    /// Marks the blocks in the sample, which were loaded before the share of the sample was known,
    /// in one part of the table.
    fn mark_some(&self, unmarked: &mut Range<Place>) {
        for place in unmarked.by_ref().take(self.table.places().div_ceil(STEPS) as usize) {
            let entry = self.table.entry(place);
            self.table.set_sampled(entry, self.samples.takes_hit(entry.key()));
        }
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use crate::{Cache, MemoryDevice};

    const SIZE: usize = 512;

    #[test]
    fn hits_are_sampled_once_a_miss_finds_the_cache_full() {
        let blocks = 4000;
        let builder = Cache::builder(2 * blocks as usize * SIZE).block_size(SIZE);
        let cache = builder.build().unwrap();
        let disk = MemoryDevice::new(vec![0; 4 * blocks as usize * SIZE]);
        let disk = cache.attach(disk).unwrap();
        let shared = &disk.shared;
        let read = |from, to| (from..to).for_each(|block| drop(disk.get(block).unwrap()));
        let count = |takes: &dyn Fn(u64) -> bool| (0..blocks).filter(|&block| takes(block)).count();
        let key = |block| disk.source.key(block).unwrap();
        let takes_hit = |block| shared.samples.takes_hit(key(block));
        read(0, blocks);
        for _ in 0..8 {
            cache.shrink(usize::MAX);
        }
        read(0, blocks);
        assert_eq!(count(&takes_hit), 0, "it was shrunk, and had room");

        // Those that are used all the time stay, and are marked once it is full.
        for block in blocks..4 * blocks {
            read(block, block + 1);
            read(block % 1000, block % 1000 + 1);
        }
        let taken = count(&takes_hit);
        assert!((64..256).contains(&taken), "256 of 8,000, and of half of these: {taken}");
        let stays = |block: &u64| shared.table.find(key(*block)).is_some();
        assert!((0..1000).filter(stays).count() > 900);
        for block in (0..4 * blocks).filter(stays) {
            assert_eq!(disk.is_sampled(block), takes_hit(block), "{block}");
        }
    }
}
