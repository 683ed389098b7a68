//! The ghosts: the keys of blocks that were evicted or refused lately. The oldest is forgotten
//! first.
//!
//! A 4-way associative table of tags of 32 bits, each with the number of its eviction. In one of a
//! billion lookups another block has the same tag: then the block looked up skips probation, and
//! nothing else happens.

use offlock_percpu::AllocError;

use crate::region::boxed;
use crate::word::Key;

const WAYS: usize = 4;

#[derive(Debug)]
pub(crate) struct Ghost {
    sets: Box<[[Seen; WAYS]]>,
    /// The number of evictions and refusals so far. The first is 1, as 0 marks an unused place.
    now: u32,
    /// The number of evictions and refusals that are remembered.
    memory: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    tag: u32,
    when: u32,
}

impl Ghost {
    pub(crate) fn new(buffers: usize) -> Result<Self, AllocError> {
        let sets = buffers.div_ceil(WAYS).next_power_of_two();
        let memory = buffers.min(u32::MAX as usize / 2) as u32;
        Ok(Self { sets: boxed([Seen::default(); WAYS], sets)?, now: 0, memory })
    }

    fn set(&mut self, key: Key) -> (&mut [Seen; WAYS], u32) {
        let hash = key.hash();
        let number = (hash >> 32) as usize & (self.sets.len() - 1);
        (&mut self.sets[number], hash as u32)
    }

    fn is_young(&self, seen: Seen) -> bool {
        seen.when != 0 && self.now.wrapping_sub(seen.when) < self.memory
    }

    /// Inserts a block that was evicted or refused.
    pub(crate) fn add(&mut self, key: Key) {
        self.now = self.now.wrapping_add(1).max(1);
        let now = self.now;
        let (set, tag) = self.set(key);
        let oldest = set.iter_mut().max_by_key(|seen| match seen.when {
            0 => u32::MAX,
            when => now.wrapping_sub(when),
        });
        if let Some(place) = oldest {
            *place = Seen { tag, when: now };
        }
    }

    /// Removes a block. Returns whether it was inserted lately.
    pub(crate) fn take(&mut self, key: Key) -> bool {
        let (set, tag) = self.set(key);
        let Some(at) = set.iter().position(|seen| seen.tag == tag && seen.when != 0) else {
            return false;
        };
        let seen = std::mem::take(&mut set[at]);
        self.is_young(seen)
    }

    /// Returns whether a block was inserted lately. If not, inserts it, so that the next call
    /// returns true.
    pub(crate) fn knows(&mut self, key: Key) -> bool {
        let (set, tag) = self.set(key);
        let at = set.iter().position(|seen| seen.tag == tag && seen.when != 0);
        let seen = at.map_or(Seen::default(), |at| set[at]);
        if self.is_young(seen) {
            return true;
        }
        self.take(key); // or the old entry would be found in place of the new one
        self.add(key);
        false
    }

    /// Sets the number of evictions and refusals that are remembered, at most the places of the
    /// table.
    pub(crate) fn resize(&mut self, buffers: usize) {
        self.memory = buffers.min(self.sets.len() * WAYS) as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_remembers_as_many_as_there_are_buffers_and_each_once() {
        let mut ghost = Ghost::new(64).unwrap();
        let key = |sector: u64| Key::new(1, sector * 8);
        (0..64).for_each(|sector| ghost.add(key(sector)));
        let found = (0..64).filter(|&sector| ghost.take(key(sector))).count();
        assert!(found > 48, "a full set forgets its oldest: {found}");
        assert!((0..64).all(|sector| !ghost.take(key(sector))), "each is taken once");

        ghost.add(key(1));
        (100..164).for_each(|sector| ghost.add(key(sector)));
        assert!(!ghost.take(key(1)), "64 came after it");
    }

    #[test]
    fn a_block_that_was_forgotten_is_known_again_once_it_was_added_again() {
        let mut ghost = Ghost::new(64).unwrap();
        let key = |sector: u64| Key::new(1, sector * 8);
        ghost.resize(2);
        for round in 0..20 {
            for sector in 0..4 {
                assert!(!ghost.knows(key(sector)), "round {round}: two came after it");
                assert!(ghost.knows(key(sector)), "round {round}");
            }
        }
    }
}
