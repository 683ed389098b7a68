//! Which buffer goes first.
//!
//! A policy is a few lists of nodes, changed under the lock of [`Cold`](crate::cold::Cold). What it
//! learns of hits are two bits in each entry's word, which hits stop writing once both are set.

mod a2;
mod clock;
mod ghost;

use percpu::AllocError;
use percpu::sync::mutant;

use crate::cold::{Nodes, On, Victim};
use crate::frames::Frame;
use crate::word::{BACK, DIRTY, EVICT, Entry, IO, Key, STALE, VALID, WRITE, Word};

/// How buffers are chosen for eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Eviction {
    /// New buffers are on probation in a tenth of the cache, unless they were evicted lately; whoever
    /// is used there once more stays. A scan passes through the tenth. The default.
    #[default]
    A2,
    /// All buffers in one circle, from which the hand takes those that were not used since its last
    /// visit: close to "least recently used", and better than [`A2`](Self::A2) where blocks are used
    /// again in the order in which they came.
    Clock,
}

/// Passes over all buffers that lower weights, in a search that evicts nothing: each lowers them twice as
/// much as the one before, so that the largest weight is zero after them.
const WEIGHT_PASSES: usize = u8::BITS as usize;
/// Passes after which uses do not keep a buffer any more: a buffer counts three at most, but hits may add
/// uses as fast as passes take them.
const USE_PASSES: usize = WEIGHT_PASSES + 3;
/// Passes after which a search gives up: each buffer was in use when the last one looked at it.
pub(crate) const PASSES: usize = USE_PASSES + 1;

/// How far a policy looks for a victim.
pub(crate) struct Looks {
    /// Passes over all buffers that this search has made since it last evicted one.
    pub(crate) pass: usize,
    /// At how many buffers it may still look.
    pub(crate) left: u32,
    /// One of those it has looked at stays, and counts as less used now.
    pub(crate) lowered: bool,
    /// How many in a row were looked at and stay: those at the front of the list of what was read once, and
    /// of the policy's main list. Once that is all of a list, the victim is on another.
    pub(crate) scanned: usize,
    pub(crate) main: usize,
    /// So many of one list are as good as all; none: each buffer is looked at once.
    most: Option<usize>,
}

impl Looks {
    pub(crate) fn new(most: Option<usize>) -> Self {
        Self { pass: 0, left: 0, lowered: false, scanned: 0, main: 0, most }
    }

    /// Whether a buffer of that weight stays for it. It weighs less at the next look.
    fn outweighs(&self, weight: &mut u8) -> bool {
        let before = *weight;
        *weight = before.saturating_sub(1 << self.pass.min(WEIGHT_PASSES - 1));
        before > 0
    }

    /// Whether uses of a buffer keep it.
    fn count_uses(&self) -> bool {
        self.pass < USE_PASSES
    }

    /// Whether there are some on a list that has `len`, of which `seen` were looked at.
    pub(crate) fn has_more(&self, seen: usize, len: usize) -> bool {
        seen < len.min(self.most.unwrap_or(usize::MAX))
    }

    /// One of the main list stays, as it was used, and may go at the next look.
    fn lower(&mut self) {
        self.main = if self.most.is_some() { 0 } else { self.main + 1 };
    }

    /// One was evicted: looks at all lists again.
    pub(crate) fn start_over(&mut self) {
        (self.scanned, self.main) = (0, 0);
    }
}

/// What a policy asks of the cache.
pub(crate) trait Buffers {
    /// The entry that has the frame.
    fn entry(&self, frame: Frame) -> &Entry;
    fn victim(&self, frame: Frame, on: On) -> Victim;
}

#[derive(Debug)]
pub(crate) enum Policy {
    A2(a2::A2),
    Clock(clock::Clock),
}

impl Policy {
    /// For that many units, in at most so many buffers.
    pub(crate) fn new(eviction: Eviction, units: usize) -> Result<Self, AllocError> {
        Ok(match eviction {
            Eviction::A2 => Self::A2(a2::A2::new(units)?),
            Eviction::Clock => Self::Clock(clock::Clock::new()),
        })
    }

    /// Takes in a buffer that is on no list.
    pub(crate) fn insert(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        frame: Frame,
        key: Key,
    ) {
        match self {
            Self::A2(a2) => a2.insert(nodes, buffers, frame, key),
            Self::Clock(clock) => clock.insert(nodes, frame),
        }
    }

    /// Takes the next to go off its list, marked `EVICT`.
    pub(crate) fn pick(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        looks: &mut Looks,
    ) -> Option<Victim> {
        match self {
            Self::A2(a2) => a2.pick(nodes, buffers, looks),
            Self::Clock(clock) => clock.pick(nodes, buffers, looks),
        }
    }

    /// Takes a victim back that is in use after all.
    pub(crate) fn keep(&mut self, nodes: &mut Nodes, frame: Frame) {
        match self {
            Self::A2(a2) => a2.keep(nodes, frame),
            Self::Clock(clock) => clock.insert(nodes, frame),
        }
    }

    /// Takes a victim back that is not needed after all: it is the next to go, as it was.
    pub(crate) fn put_back(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        match self {
            Self::A2(a2) => a2.put_back(nodes, frame, list),
            Self::Clock(clock) => clock.put_back(nodes, frame),
        }
    }

    /// A buffer goes that was on that list, and whose turn it was not.
    pub(crate) fn lose(&mut self, list: u8, key: Key) {
        if let Self::A2(a2) = self {
            a2.lose(list, key);
        }
    }

    /// Takes a buffer off whichever of the policy's lists it is on.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        match self {
            Self::A2(a2) => a2.remove(nodes, frame, list),
            Self::Clock(clock) => clock.remove(nodes, frame),
        }
    }

    /// Buffers on its lists.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::A2(a2) => a2.len(),
            Self::Clock(clock) => clock.len(),
        }
    }

    /// The cache has that many units now.
    pub(crate) fn resize(&mut self, units: usize) {
        if let Self::A2(a2) = self {
            a2.resize(units);
        }
    }
}

/// Whether nobody has a buffer pinned or works on it.
pub(crate) fn may_go(word: Word) -> bool {
    if mutant("evict-what-is-loading") && word.has(IO) {
        return !word.has(EVICT | STALE);
    }
    let dirty = if mutant("evict-what-is-dirty") { 0 } else { DIRTY };
    word.pins() == 0 && word.has(VALID) && !word.has(IO | EVICT | STALE | WRITE | dirty | BACK)
}

/// Marks a buffer as being evicted, unless somebody has it pinned or works on it.
pub(crate) fn mark(entry: &Entry) -> bool {
    let mut seen = entry.word();
    while may_go(seen) {
        match entry.try_change(seen, EVICT, 0) {
            Ok(()) => return true,
            Err(now) => seen = now,
        }
    }
    false
}
