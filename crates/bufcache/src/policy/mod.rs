//! The eviction policy: which buffer is evicted first.
//!
//! The policy is a few lists of frames under one lock. Hits reach it as a count of two bits in each
//! entry's word, which hits stop writing at 3.
//!
//! An adaptive cache also has [`Shadows`]: small directories of keys, one for each rule. They get
//! the requests for a sample of the blocks, and the cache follows the rule whose shadow had the
//! most hits lately. Threads put their hits of sampled blocks into [`Samples`], from which the next
//! sampled miss takes them. If even the shadow of the rule in force has few hits, the cache refuses
//! the first claim of a block, and remembers it among the ghosts.

mod shadow;

use std::mem;

use offlock_percpu::AllocError;
use offlock_sync::check;

pub(crate) use self::shadow::{Samples, Shadows, sampled_blocks};
use crate::frames::{Frame, Links, List, boxed};
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
    /// Set once the search has ended at such a buffer.
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

    /// Returns whether a list of `len` buffers, of which `seen` were visited, has more to visit.
    fn has_more(&self, seen: usize, len: usize) -> bool {
        seen < len.min(self.most.unwrap_or(usize::MAX))
    }
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

/// Where a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    /// On no list: the frame is free, or a thread owns it.
    Nothing,
    Newer,
    Older,
    Main,
    /// On main, until it is written: it was the next victim of probation, but dirty.
    MainDueOnProbation,
    /// On main, until it is written: it was the next victim of main, but dirty.
    MainDue,
    /// On the list of invalidated buffers, which are freed when no slot and no pin holds them.
    Dead,
}

impl On {
    /// Returns the number of the list of a frame that is on one.
    fn list(self) -> usize {
        debug_assert!(self != Self::Nothing);
        match self {
            Self::Newer => 0,
            Self::Older => 1,
            Self::Dead => 3,
            _ => 2,
        }
    }

    /// Returns whether a frame is on a list from which it may be evicted.
    fn is_live(self) -> bool {
        !matches!(self, Self::Nothing | Self::Dead)
    }
}

/// Ghosts per buffer. With one, the trace P3 with room for 5 % has 2 points fewer hits.
const GHOSTS: usize = 2;

/// The frames of a cache, or of a shadow: the free ones, and lists of the buffers.
///
/// Nothing here allocates after `new`, and no call walks a list further than its budget.
#[derive(Debug)]
pub(crate) struct Policy {
    nodes: Box<[(Links, On)]>,
    /// At [`On::list`].
    lists: [List; 4],
    ghost: Ghost,
    rule: Eviction,
    /// The number of frames that may be in use.
    limit: usize,
    /// The number of the first frame that was never used.
    fresh: u32,
    /// Used frames that are free now. The one that was freed last is taken first.
    free: Vec<Frame>,
    /// The buffers of probation.
    probation: usize,
    /// Set until a miss finds the cache full. Later, room in the main list is not a reason to
    /// insert there: it may come from an eviction, and belong to probation.
    filling: bool,
}

impl Policy {
    /// Returns the empty lists of a cache of so many frames.
    pub(crate) fn new(rule: Eviction, frames: usize) -> Result<Self, AllocError> {
        let (mut nodes, mut free) = (Vec::new(), Vec::new());
        nodes.try_reserve_exact(frames).map_err(|_| AllocError::new())?;
        nodes.extend((0..frames).map(|_| (Links::new(), On::Nothing)));
        free.try_reserve_exact(frames).map_err(|_| AllocError::new())?;
        let mut new = Self {
            nodes: nodes.into(),
            lists: [List::new(); 4],
            ghost: Ghost::new(if rule == Eviction::Clock { 1 } else { frames * GHOSTS })?,
            rule,
            limit: frames,
            fresh: 0,
            free,
            probation: 0,
            filling: true,
        };
        new.set_rule(rule);
        Ok(new)
    }

    /// Takes a free frame, if there is one.
    pub(crate) fn take(&mut self) -> Option<Frame> {
        if self.in_use() >= self.limit {
            return None;
        }
        let freed = self.free.pop();
        Some(freed.unwrap_or_else(|| {
            self.fresh += 1;
            Frame(self.fresh - 1)
        }))
    }

    /// Frees a frame that is on no list.
    pub(crate) fn give(&mut self, frame: Frame) {
        self.free.push(frame); // within the capacity reserved in `new`
    }

    /// Returns whether more frames are free than evictions leave: one in 64. Evictions are in
    /// batches of as many at most, by each thread that misses.
    pub(crate) fn has_room(&self) -> bool {
        self.limit.saturating_sub(self.in_use()) > self.limit / 64
    }

    /// Limits the frames in use. Frames beyond the limit stay in use until they are freed.
    pub(crate) fn set_limit(&mut self, frames: usize) {
        let frames = frames.min(self.nodes.len());
        self.filling |= frames > self.limit;
        self.limit = frames;
        self.set_rule(self.rule);
    }

    /// Returns the number of frames in use.
    pub(crate) fn in_use(&self) -> usize {
        self.fresh as usize - self.free.len()
    }

    /// Returns whether more frames are in use than the limit.
    pub(crate) fn exceeds_limit(&self) -> bool {
        self.in_use() > self.limit
    }

    /// Sets the rule.
    pub(crate) fn set_rule(&mut self, rule: Eviction) {
        self.rule = rule;
        self.probation = match rule {
            Eviction::A2 | Eviction::Adaptive => (self.limit / 10).max(1),
            Eviction::A2Small => (self.limit / 100).max(1),
            Eviction::Clock => 0,
        };
    }

    pub(crate) fn rule(&self) -> Eviction {
        self.rule
    }

    /// Returns whether a miss has found the cache full, and not much has become free since.
    pub(crate) fn is_nearly_full(&self) -> bool {
        !self.filling && 16 * self.len() >= 15 * self.limit
    }

    /// Notes that a miss has found the cache full.
    pub(crate) fn note_full(&mut self) {
        self.filling = false;
        self.ghost.resize(self.len() * GHOSTS);
    }

    /// Returns the number of live buffers on the lists.
    pub(crate) fn len(&self) -> usize {
        self.on_probation() + self.len_of(On::Main)
    }

    /// Returns the number of buffers on probation.
    fn on_probation(&self) -> usize {
        self.len_of(On::Newer) + self.len_of(On::Older)
    }

    fn len_of(&self, on: On) -> usize {
        self.lists[on.list()].len
    }

    fn last(&self, on: On) -> Option<Frame> {
        self.lists[on.list()].last()
    }

    /// Puts a frame that is on no list on one, as the newest.
    fn push(&mut self, frame: Frame, on: On) {
        let Self { nodes, lists, .. } = self;
        debug_assert!(nodes[frame.0 as usize].1 == On::Nothing);
        nodes[frame.0 as usize].1 = on;
        lists[on.list()].push(frame, |at| &nodes[at as usize].0);
    }

    /// Removes a frame from the list that it is on, which the caller knows.
    #[inline]
    fn unlink(&mut self, frame: Frame, on: On) {
        let Self { nodes, lists, .. } = self;
        debug_assert!(nodes[frame.0 as usize].1.list() == on.list());
        nodes[frame.0 as usize].1 = On::Nothing;
        lists[on.list()].remove(frame, |at| &nodes[at as usize].0);
    }

    /// Returns whether a block that is not cached was evicted from probation or refused lately. If not,
    /// inserts it among the ghosts, so that the next call for it returns true.
    pub(crate) fn knows(&mut self, key: Key) -> bool {
        self.ghost.knows(key)
    }

    /// Inserts a buffer that is on no list. `entry_of` returns the entry of a frame.
    pub(crate) fn insert<'e>(
        &mut self,
        entry_of: impl Fn(Frame) -> &'e Entry,
        frame: Frame,
        key: Key,
    ) {
        let room = self.len_of(On::Main) + 1 + self.probation <= self.limit;
        let goes_to_main = self.rule == Eviction::Clock
            || (self.filling && room)
            || (self.ghost.take(key) && self.passes_gate(&entry_of));
        let entry = entry_of(frame);
        // A load that is likely to be used again has the flag from its beginning.
        if entry.word().has(NEW) == goes_to_main {
            entry.change(NEW * u64::from(!goes_to_main), NEW);
        }
        if goes_to_main {
            return self.keep(frame);
        }
        self.push(frame, On::Newer);
        // The oldest buffer of the newer half moves to the older half.
        if self.len_of(On::Newer) > self.probation / 2 {
            if let Some(aged) = self.last(On::Newer) {
                self.unlink(aged, On::Newer);
                entry_of(aged).change(0, NEW);
                self.push(aged, On::Older);
            }
        }
    }

    /// Returns whether a ghost may enter main. Otherwise main's oldest buffer loses a use.
    fn passes_gate<'e>(&mut self, entry_of: impl Fn(Frame) -> &'e Entry) -> bool {
        // After a change of the rule, ghosts enter main freely until probation has become small. With
        // a limit of `probation` in place of twice that, the trace P3 with room for 5 % has 2 points
        // fewer hits.
        if self.rule != Eviction::A2Small || self.on_probation() > 2 * self.probation {
            return true;
        }
        let Some(oldest) = self.last(On::Main) else { return true };
        let is_used = entry_of(oldest).take_used(|used| used.saturating_sub(1)) > 0;
        if is_used {
            self.unlink(oldest, On::Main);
            self.keep(oldest);
        }
        !is_used
    }

    /// Removes the next victim from its list and marks it `EVICT`. Returns `None` if `looks` allows
    /// no further visit.
    pub(crate) fn pick<'e>(
        &mut self,
        entry_of: impl Fn(Frame) -> &'e Entry,
        looks: &mut Looks,
    ) -> Option<Frame> {
        while looks.left > 0 && !looks.has_met_dirty {
            looks.left -= 1;
            let on = self.next_list(looks);
            let frame = self.last(on)?;
            let entry = entry_of(frame);
            let takes_one = on == On::Main && self.rule != Eviction::Clock;
            let stays = entry.take_used(|used| if takes_one { used.saturating_sub(1) } else { 0 })
                > 0
                && looks.pass < USE_PASSES;
            looks.lowered |= stays;
            let is_marked = !stays && mark(entry);
            let is_due = !stays && !is_marked && looks.until_dirty;
            if is_due && is_evictable_but_dirty(entry.word()) {
                looks.has_met_dirty = true; // it stays the next victim
                return None;
            }
            self.unlink(frame, on);
            if is_marked {
                if on != On::Main {
                    self.ghost.add(entry.key());
                }
                return Some(frame);
            }
            if on == On::Newer {
                entry.change(0, NEW);
            }
            let kept_on = match on {
                _ if stays || !entry.word().has(DIRTY) => On::Main,
                On::Main => On::MainDue,
                _ => On::MainDueOnProbation,
            };
            self.push(frame, kept_on);
            // A used buffer of main may be evicted at the next visit.
            let starts_over = stays && on == On::Main && looks.most.is_some();
            looks.main = if starts_over { 0 } else { looks.main + 1 };
        }
        None
    }

    /// Returns the list that has the next victim.
    fn next_list(&self, looks: &Looks) -> On {
        if self.on_probation() < self.probation && looks.has_more(looks.main, self.len_of(On::Main))
        {
            On::Main
        } else if self.len_of(On::Older) > 0 {
            On::Older
        } else if self.len_of(On::Newer) > 0 {
            On::Newer
        } else {
            On::Main
        }
    }

    /// Returns the next victim, or the buffer behind `after` on the list of the next victim.
    pub(crate) fn next_due(&self, after: Option<Frame>) -> Option<Frame> {
        let Some(frame) = after else { return self.last(self.next_list(&Looks::new(None))) };
        let (links, on) = &self.nodes[frame.0 as usize];
        links.newer().filter(|_| on.is_live())
    }

    /// Puts a buffer that is on no list on main, as the last to be evicted.
    pub(crate) fn keep(&mut self, frame: Frame) {
        self.push(frame, On::Main);
    }

    /// Makes a buffer that was due for eviction, but dirty, the next victim of its list. The caller has
    /// written the frame's block; by now the frame may be free, or have another block.
    pub(crate) fn evict_next(&mut self, frame: Frame) {
        let on = match self.nodes[frame.0 as usize].1 {
            On::MainDueOnProbation => On::Older,
            On::MainDue => On::Main,
            _ => return, // if it is on no list, an evictor is about to keep it
        };
        self.unlink(frame, On::Main);
        let Self { nodes, lists, .. } = self;
        nodes[frame.0 as usize].1 = on;
        lists[on.list()].push_last(frame, |at| &nodes[at as usize].0);
    }

    /// Removes a buffer from the list that it may be evicted from. Returns whether it was on one.
    pub(crate) fn withdraw(&mut self, frame: Frame) -> bool {
        let on = self.nodes[frame.0 as usize].1;
        if on.is_live() {
            self.unlink(frame, on);
        }
        on.is_live()
    }

    /// Returns the number of invalidated buffers.
    pub(crate) fn dead(&self) -> usize {
        self.len_of(On::Dead)
    }

    /// Puts an invalidated buffer that is on no list on the list of the dead.
    pub(crate) fn push_dead(&mut self, frame: Frame) {
        self.push(frame, On::Dead);
    }

    /// Takes the oldest buffer off the list of the dead.
    pub(crate) fn take_dead(&mut self) -> Option<Frame> {
        let frame = self.last(On::Dead)?;
        self.unlink(frame, On::Dead);
        Some(frame)
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
        let seen = mem::take(&mut set[at]);
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
