//! Which buffer goes first.
//!
//! The policy is a few lists of nodes, changed under the lock of [`Cold`](crate::cold::Cold). What it
//! learns of hits are two bits in each entry's word, which hits stop writing once both are set.
//!
//! An adaptive cache has [`Shadows`] beside it: small directories of keys, one for each rule. They get the
//! requests for a sample of the blocks, and the cache follows the rule whose shadow had the most hits lately.
//! Threads leave their hits of sampled blocks in [`Samples`]; the next sampled miss takes them from there.

mod ghost;
mod lists;
mod samples;
mod shadow;

use percpu::sync::{check, mutant};

pub(crate) use self::lists::Policy;
pub(crate) use self::samples::Samples;
pub(crate) use self::shadow::{Shadows, sampled_blocks};
use crate::cold::{On, Victim};
use crate::frames::Frame;
use crate::word::{BACK, DIRTY, EVICT, Entry, IO, STALE, VALID, WRITE, Word};

/// How buffers are chosen for eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Eviction {
    /// Whichever of the others would have had the most hits lately, found out on a sample of the blocks.
    /// The default.
    ///
    /// Takes memory beside that of the buffers, for any number of threads and devices: none where the capacity is
    /// fewer than 128 blocks of the smallest size, which has [`A2`](Self::A2) then; at most 24 KiB for 128, 64 KiB
    /// for 512, and 180 KiB from 2,048 on. Blocks are sampled once the cache was full, one in eight at most. Of a
    /// cache that holds fewer than 64 blocks, large ones, nothing is learned: A2 stays in force.
    #[default]
    Adaptive,
    /// New buffers are on probation in a tenth of the cache, unless they were evicted lately; a buffer that
    /// is used there once more stays. A scan passes through the tenth.
    A2,
    /// The same with probation in a hundredth, and fewer ways out of it: for loops that are just larger than
    /// the cache, and for blocks whose use never changes.
    A2Small,
    /// All buffers in one circle, from which the hand takes those that were not used since its last
    /// visit: close to "least recently used", and better than [`A2`](Self::A2) where blocks are used
    /// again in the order in which they came, or once more only.
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

/// Whether nobody has a buffer pinned or works on it.
pub(crate) fn may_go(word: Word) -> bool {
    if mutant("evict-what-is-loading") && word.has(IO) {
        return !word.has(EVICT | STALE);
    }
    let idle = word.pins() == 0 && word.has(VALID) && !word.has(IO | EVICT | STALE | WRITE | BACK);
    idle && check!("evict: the buffer is clean", !word.has(DIRTY))
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
