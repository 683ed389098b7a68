//! The eviction policy: which buffer is evicted first.
//!
//! The policy is a few lists of nodes, changed under the lock of [`Cold`](crate::cold::Cold). Hits
//! reach it as a count of two bits in each entry's word, which hits stop writing at 3.
//!
//! An adaptive cache also has [`Shadows`]: small directories of keys, one for each rule. They get
//! the requests for a sample of the blocks, and the cache follows the rule whose shadow had the
//! most hits lately. Threads put their hits of sampled blocks into [`Samples`], from which the next
//! sampled miss takes them. If even the shadow of the rule in force has few hits, the cache refuses
//! the first claim of a block, and remembers it among the ghosts.

mod ghost;
mod lists;
mod samples;
mod shadow;

use offlock_sync::check;

pub(crate) use self::lists::Policy;
pub(crate) use self::samples::Samples;
pub(crate) use self::shadow::{Shadows, sampled_blocks};
use crate::frames::Frame;
use crate::nodes::Victim;
use crate::word::{BACK, DIRTY, EVICT, Entry, IO, STALE, VALID, WRITE, Word};

/// How buffers are chosen for eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Eviction {
    /// The rule of the three below that would have had the most hits lately, measured on a sample
    /// of the blocks. The default.
    ///
    /// Takes memory besides the buffers, whatever the number of threads and devices: at most 24 KiB
    /// for a capacity of 128 blocks of the smallest size, 64 KiB for 512, and 180 KiB from 2,048
    /// on. A smaller cache takes none and uses [`A2`](Self::A2). Blocks are sampled once the cache
    /// has been full, at most one in eight. A cache that holds fewer than 64 blocks, because they
    /// are large, keeps A2.
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
fn is_idle(word: Word) -> bool {
    word.pins() == 0 && word.has(VALID) && !word.has(IO | EVICT | STALE | WRITE | BACK)
}

/// Returns whether a buffer may be evicted: it is idle and clean.
pub(crate) fn is_evictable(word: Word) -> bool {
    is_idle(word) && check!("evict: the buffer is clean", !word.has(DIRTY))
}

/// Returns whether a buffer may be evicted once it is written.
pub(crate) fn is_evictable_but_dirty(word: Word) -> bool {
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
