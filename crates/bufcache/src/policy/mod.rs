//! The eviction policy: which buffer is evicted first.
//!
//! The policy is a few lists of nodes, changed under the lock of [`Lists`](crate::cache::evict::Lists). Hits
//! reach it as a count of two bits in each entry's word, which hits stop writing at 3.
//!
//! An adaptive cache also has [`Shadows`]: small directories of keys, one for each rule. They get
//! the requests for a sample of the blocks, and the cache follows the rule whose shadow had the
//! most hits lately. Threads put their hits of sampled blocks into [`Samples`], from which the next
//! sampled miss takes them. If even the shadow of the rule in force has few hits, the cache refuses
//! the first claim of a block, and remembers it among the ghosts.

mod shadow;

use offlock_percpu::AllocError;
use offlock_sync::check;

pub(crate) use self::shadow::{Samples, Shadows, sampled_blocks};
use crate::frames::{Frame, List, Nodes, On, Victim, boxed};
use crate::word::{BACK, DIRTY, EVICT, Entry, EntryWord, IO, Key, NEW, STALE, VALID, WRITE};

/// How buffers are chosen for eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Eviction {
    /// The rule of the three below that would have had the most hits lately, measured on a sample
    /// of the blocks. The default.
    ///
    /// Takes memory besides the buffers, whatever the number of threads and devices: at most 24 KiB
    /// for a capacity of 128 blocks, 64 KiB for 512, and 180 KiB from 2,048 on. A smaller cache takes
    /// none and uses [`A2`](Self::A2). At most one block in eight is sampled.
    #[default]
    Adaptive,
    /// New buffers are on probation in a tenth of the cache, unless they were evicted lately. A
    /// buffer that is used again there stays. A scan passes through the tenth.
    A2,
    /// As [`A2`](Self::A2), with probation in a hundredth of the cache and stricter conditions to
    /// leave it. For loops just larger than the cache, and for blocks whose use never changes.
    A2Small,
    /// All buffers are in one circle, and the hand evicts those that were not used since its last
    /// visit. Close to "least recently used", and better than [`A2`](Self::A2) if blocks are used
    /// again in the order of their loads, or only once more.
    Clock,
}

/// The passes after which uses do not keep a buffer any more. A buffer counts at most three, but
/// hits may add uses as fast as passes take them.
const USE_PASSES: usize = 4;
/// The passes after which a search gives up: every buffer was in use in the last one.
pub(crate) const PASSES: usize = USE_PASSES + 1;

/// The progress and the limits of a search for a victim.
pub(crate) struct Looks {
    /// The passes over all buffers since this search last evicted one.
    pub(crate) pass: usize,
    /// The number of buffers that it may still visit.
    pub(crate) left: u32,
    /// Set if a visited buffer stays and counts as less used now.
    pub(crate) lowered: bool,
    /// The buffers visited in a row that stay on the main list. They are at its front. If it is the
    /// whole list, the victim is on another.
    pub(crate) main: usize,
    /// Whether the search ends at a buffer that is due for eviction, but dirty.
    pub(crate) until_dirty: bool,
    /// Set if it has.
    pub(crate) has_met_dirty: bool,
    /// Visits of one list after which the search continues on another. `None`: each buffer is
    /// visited once.
    most: Option<usize>,
}

impl Looks {
    pub(crate) fn new(most: Option<usize>) -> Self {
        Self {
            pass: 0,
            left: 0,
            lowered: false,
            main: 0,
            until_dirty: false,
            has_met_dirty: false,
            most,
        }
    }

    /// Returns whether uses still keep a buffer.
    fn count_uses(&self) -> bool {
        self.pass < USE_PASSES
    }

    /// Returns whether a list of `len` buffers, of which `seen` were visited, has more to visit.
    pub(crate) fn has_more(&self, seen: usize, len: usize) -> bool {
        seen < len.min(self.most.unwrap_or(usize::MAX))
    }

    /// A buffer of the main list stays because it was used, and may be evicted at the next visit.
    fn lower(&mut self) {
        self.main = if self.most.is_some() { 0 } else { self.main + 1 };
    }

    /// A buffer was evicted, so all lists are visited again.
    pub(crate) fn start_over(&mut self) {
        self.main = 0;
    }
}

/// The buffers of the cache, or of a shadow, as a policy uses them.
pub(crate) trait Buffers {
    /// Returns the entry that has the frame.
    fn entry(&self, frame: Frame) -> &Entry;
    /// Returns the buffer as a victim.
    fn victim(&self, frame: Frame) -> Victim;
}

/// Returns whether a buffer is live, and not pinned, loaded or written.
fn is_idle(word: EntryWord) -> bool {
    word.pins() == 0 && word.has(VALID) && !word.has(IO | EVICT | STALE | WRITE | BACK)
}

/// Returns whether a buffer may be evicted: it is idle and clean.
pub(crate) fn is_evictable(word: EntryWord) -> bool {
    is_idle(word) && check!("evict: the buffer is clean", !word.has(DIRTY))
}

/// Returns whether a buffer may be evicted once it is written.
pub(crate) fn is_evictable_but_dirty(word: EntryWord) -> bool {
    is_idle(word) && word.has(DIRTY)
}

/// Marks a buffer `EVICT` if it may be evicted. Returns whether it is marked. Lock-free.
pub(crate) fn mark(entry: &Entry) -> bool {
    let mut seen = entry.word();
    while is_evictable(seen) {
        match entry.try_change(seen, EVICT, 0) {
            Ok(()) => return true,
            Err(now) => seen = now,
        }
    }
    false
}

// The lists of the buffers, ordered by one of three rules.
//
// ```text
//           ┌─ evicted lately ──────────────────────┐
//  insert ──┤                                       ▼
//           └─► probation: newer half │ older half ──► main ◄─┐
//                                      │   used     │    └────┘ used
//                                      ▼ not used   ▼ not used
//                                     ghost        gone
// ```
//
// [`Eviction::A2`] is S3-FIFO with four changes, each of which gains hits on the traces of the
// benches:
//
// - The main list is filled first, so that a cache that is not full yet evicts nothing early.
// - Hits in the newer half of probation do not count, because they belong to the same use. The
//   flag `NEW` marks these buffers, and a hit writes nothing.
// - One hit in the older half of probation is enough for a buffer to enter main.
// - There are twice as many ghosts as buffers.
//
// [`Eviction::A2Small`] has a tenth of that probation, and a gate: a ghost enters main only if
// main's oldest buffer has no use left; otherwise that buffer loses a use. [`Eviction::Clock`] has
// no probation, and one visit takes all uses of a buffer. The rule may change at any time: the
// buffers stay on their lists, and those on probation leave it by evictions under the new rule.
//
// S3-FIFO is by Yang, Zhang, Qiu, Yue and Rashmi (SOSP 2023).

const NEWER: u8 = 0;
const OLDER: u8 = 1;
const MAIN: u8 = 2;
/// On main, until it is written: it was the next victim of probation, or of main, but dirty.
const DUE_ON_PROBATION: u8 = 3;
const DUE_ON_MAIN: u8 = 4;

/// Ghosts per buffer. With one, the trace P3 with room for 5 % has 2 points fewer hits.
const GHOSTS: usize = 2;

/// The lists of a cache, or of a shadow.
#[derive(Debug)]
pub(crate) struct Policy {
    newer: List,
    older: List,
    main: List,
    ghost: Ghost,
    rule: Eviction,
    /// The buffers of the cache.
    most: usize,
    /// The buffers of probation.
    probation: usize,
    /// Set until a miss finds the cache full. Later, room in the main list is not a reason to
    /// insert there: it may come from an eviction, and belong to probation.
    filling: bool,
}

impl Policy {
    /// Returns the empty lists of a cache of `most` buffers.
    pub(crate) fn new(rule: Eviction, most: usize) -> Result<Self, AllocError> {
        let [newer, older, main] = [List::new(); 3];
        let ghost = Ghost::new(if rule == Eviction::Clock { 1 } else { most * GHOSTS })?;
        let mut new = Self { newer, older, main, ghost, rule, most, probation: 0, filling: true };
        new.set_rule(rule);
        Ok(new)
    }

    /// Sets the rule.
    pub(crate) fn set_rule(&mut self, rule: Eviction) {
        self.rule = rule;
        self.probation = match rule {
            Eviction::A2 | Eviction::Adaptive => (self.most / 10).max(1),
            Eviction::A2Small => (self.most / 100).max(1),
            Eviction::Clock => 0,
        };
    }

    pub(crate) fn rule(&self) -> Eviction {
        self.rule
    }

    /// Returns whether a miss has found the cache full since it last grew.
    pub(crate) fn is_full(&self) -> bool {
        !self.filling
    }

    /// Notes that a miss has found the cache full.
    pub(crate) fn note_full(&mut self) {
        self.filling = false;
        self.ghost.resize(self.len() * GHOSTS);
    }

    /// Sets the number of buffers of the cache.
    pub(crate) fn resize(&mut self, most: usize) {
        self.filling |= most > self.most;
        self.most = most;
        self.set_rule(self.rule);
    }

    /// Returns the number of buffers on the lists.
    pub(crate) fn len(&self) -> usize {
        self.newer.len + self.older.len + self.main.len
    }

    /// Returns the number of buffers on probation.
    fn on_probation(&self) -> usize {
        self.newer.len + self.older.len
    }

    fn list(&mut self, which: u8) -> &mut List {
        match which {
            NEWER => &mut self.newer,
            OLDER => &mut self.older,
            _ => &mut self.main,
        }
    }

    /// Returns whether a block that is not cached was evicted from probation or refused lately. If not,
    /// inserts it among the ghosts, so that the next call for it returns true.
    pub(crate) fn knows(&mut self, key: Key) -> bool {
        self.ghost.knows(key)
    }

    /// Inserts a buffer that is on no list.
    pub(crate) fn insert(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        frame: Frame,
        key: Key,
    ) {
        let room = self.main.len + 1 + self.probation <= self.most;
        let goes_to_main = self.rule == Eviction::Clock
            || (self.filling && room)
            || (self.ghost.take(key) && self.passes_gate(nodes, buffers));
        let entry = buffers.entry(frame);
        // A load that is likely to be used again has the flag from its beginning.
        if entry.word().has(NEW) == goes_to_main {
            entry.change(NEW * u64::from(!goes_to_main), NEW);
        }
        if goes_to_main {
            return self.keep(nodes, frame);
        }
        nodes.push(&mut self.newer, frame, On::Policy(NEWER));
        // The oldest buffer of the newer half moves to the older half.
        if self.newer.len > self.probation / 2 {
            if let Some(aged) = self.newer.last() {
                nodes.remove(&mut self.newer, aged);
                buffers.entry(aged).change(0, NEW);
                nodes.push(&mut self.older, aged, On::Policy(OLDER));
            }
        }
    }

    /// Returns whether a ghost may enter main. Otherwise main's oldest buffer loses a use.
    fn passes_gate(&mut self, nodes: &mut Nodes, buffers: &impl Buffers) -> bool {
        // After a change of the rule, main has room until probation has become small. With a room of
        // probation's part alone, the trace P3 with room for 5 % has 2 points fewer hits.
        if self.rule != Eviction::A2Small || self.on_probation() > 2 * self.probation {
            return true;
        }
        let Some(oldest) = self.main.last() else { return true };
        let is_used = buffers.entry(oldest).take_used(|used| used.saturating_sub(1)) > 0;
        if is_used {
            nodes.remove(&mut self.main, oldest);
            self.keep(nodes, oldest);
        }
        !is_used
    }

    /// Removes the next victim from its list and marks it `EVICT`. Returns `None` if `looks` allows
    /// no further visit.
    pub(crate) fn pick(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        looks: &mut Looks,
    ) -> Option<Victim> {
        while looks.left > 0 && !looks.has_met_dirty {
            looks.left -= 1;
            let which = self.next_list(looks);
            let frame = self.list(which).last()?;
            let entry = buffers.entry(frame);
            let takes_one = which == MAIN && self.rule != Eviction::Clock;
            let stays = entry.take_used(|used| if takes_one { used.saturating_sub(1) } else { 0 })
                > 0
                && looks.count_uses();
            looks.lowered |= stays;
            let is_marked = !stays && mark(entry);
            let is_due = !stays && !is_marked && looks.until_dirty;
            if is_due && is_evictable_but_dirty(entry.word()) {
                looks.has_met_dirty = true; // it stays the next victim
                return None;
            }
            nodes.remove(self.list(which), frame);
            if is_marked {
                if which != MAIN {
                    self.ghost.add(entry.key());
                }
                return Some(buffers.victim(frame));
            }
            if which == NEWER {
                entry.change(0, NEW);
            }
            let on = match which {
                _ if stays || !entry.word().has(DIRTY) => MAIN,
                MAIN => DUE_ON_MAIN,
                _ => DUE_ON_PROBATION,
            };
            nodes.push(&mut self.main, frame, On::Policy(on));
            if stays && which == MAIN {
                looks.lower();
            } else {
                looks.main += 1;
            }
        }
        None
    }

    /// Returns the list that has the next victim.
    fn next_list(&self, looks: &Looks) -> u8 {
        if self.on_probation() < self.probation && looks.has_more(looks.main, self.main.len) {
            MAIN
        } else if !self.older.is_empty() {
            OLDER
        } else if !self.newer.is_empty() {
            NEWER
        } else {
            MAIN
        }
    }

    /// Returns the buffer that would be the next victim, or that would be it after another one.
    pub(crate) fn next_due(&self, nodes: &Nodes, after: Option<Frame>) -> Option<Frame> {
        if let Some(frame) = after {
            return nodes.newer(frame);
        }
        match self.next_list(&Looks::new(None)) {
            NEWER => self.newer.last(),
            OLDER => self.older.last(),
            _ => self.main.last(),
        }
    }

    /// Inserts a buffer into main, at the back of the order of eviction.
    pub(crate) fn keep(&mut self, nodes: &mut Nodes, frame: Frame) {
        nodes.push(&mut self.main, frame, On::Policy(MAIN));
    }

    /// Makes a buffer that was due for eviction, but dirty, the next victim of its list. The caller has
    /// written the frame's block; by now the frame may be free, or have another block.
    pub(crate) fn evict_next(&mut self, nodes: &mut Nodes, frame: Frame) {
        let list = match nodes.on(frame) {
            On::Policy(DUE_ON_PROBATION) => OLDER,
            On::Policy(DUE_ON_MAIN) => MAIN,
            _ => return, // if it is on no list, an evictor is about to keep it
        };
        nodes.remove(&mut self.main, frame);
        nodes.push_last(self.list(list), frame, On::Policy(list));
    }

    /// Removes a buffer from the given list, which it is on.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        nodes.remove(self.list(list), frame);
    }
}

// The ghosts: the keys of blocks that were evicted or refused lately. The oldest is forgotten
// first.
//
// A 4-way associative table of tags of 32 bits, each with the number of its eviction. In one of a
// billion lookups another block has the same tag: then the block looked up skips probation, and
// nothing else happens.

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

    /// Returns whether a block was inserted lately. If not, inserts it.
    pub(crate) fn knows(&mut self, key: Key) -> bool {
        let (set, tag) = self.set(key);
        let seen = set.iter().find(|seen| seen.tag == tag && seen.when != 0).copied();
        if seen.is_some_and(|seen| self.is_young(seen)) {
            return true; // it stays where it is: a repeated claim does not age the others
        }
        self.take(key); // an old entry would be found in place of the new one
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
mod ghost_tests {
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
