//! The dirty blocks that a write-back selects.

use std::ops::Range;

use super::Shared;
use super::evict::LOOKS;
use crate::dirty::WriteError;
use crate::few::Few;
use crate::frames::Frame;
use crate::policy::is_evictable_but_dirty;
use crate::source::Source;
use crate::word::{DIRTY, Key};

/// The most blocks that a selection returns without an allocation. A thread that needs a buffer
/// writes at most as many.
const FEW: usize = 64;

/// Which dirty blocks of a device a write-back writes, and how.
#[derive(Clone, Debug)]
pub(crate) struct Selection {
    /// Only blocks in this range.
    pub(crate) sectors: Range<u64>,
    /// The most blocks. If there are more, the oldest are taken.
    pub(crate) most: usize,
    /// Only blocks that became dirty before this time, in milliseconds since the cache was made.
    pub(crate) before: u64,
    /// Makes the blocks durable (FUA).
    pub(crate) durable: bool,
    /// Waits for blocks that are marked.
    pub(crate) wait: bool,
    /// Whether blocks are included whose write may fail.
    pub(crate) include: Include,
    /// Only those that would be evicted next if they were not dirty.
    pub(crate) is_due: bool,
}

/// Whether a write-back includes blocks whose write may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Include {
    /// Blocks whose write has not failed. With a limit of few blocks,
    /// older ones that cannot be written do not take the places of others.
    Promising,
    /// All blocks but those that the cleaner has given up, because their device is gone. A failure
    /// counts.
    NotGivenUp,
    /// All blocks, for an explicit flush or sync. A failure does not count.
    All,
}

impl Selection {
    /// Returns a selection of all blocks that are dirty now.
    pub(crate) fn all() -> Self {
        Self {
            sectors: 0..u64::MAX,
            most: usize::MAX,
            before: u64::MAX,
            durable: false,
            wait: true,
            include: Include::All,
            is_due: false,
        }
    }
}

/// A dirty block to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirtyBlock {
    pub(super) key: Key,
    pub(super) frame: Frame,
}

impl DirtyBlock {
    pub(super) const NONE: Self = Self { key: Key::NONE, frame: Frame(0) };
}

/// The selected dirty blocks.
pub(super) struct DirtyBlocks {
    inline: Few<DirtyBlock, FEW>,
    /// All of them, if `most` is above `FEW`.
    heap: Vec<DirtyBlock>,
    most: usize,
}

impl DirtyBlocks {
    fn try_new(most: usize) -> Result<Self, WriteError> {
        let mut heap = Vec::new();
        if most > FEW {
            heap.try_reserve_exact(most).map_err(|_| WriteError::NoMemory)?;
        }
        Ok(Self { inline: Few::new(DirtyBlock::NONE), heap, most })
    }

    /// Adds a block. Returns whether there is room for another.
    fn push(&mut self, dirty: DirtyBlock) -> bool {
        match self.most {
            0..=FEW => self.inline.push(dirty),
            _ => self.heap.push(dirty),
        }
        self.as_mut_slice().len() < self.most
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [DirtyBlock] {
        if self.most > FEW { &mut self.heap } else { &mut self.inline }
    }
}

impl Shared {
    /// Returns the selected blocks of the device.
    pub(super) fn dirty_blocks(
        &self,
        source: &Source,
        selection: &Selection,
    ) -> Result<DirtyBlocks, WriteError> {
        if selection.is_due {
            return self.due_blocks(source, selection);
        }
        let (len, mut walk) = {
            let list = source.writes.dirty.lock();
            (list.len(), list.walk())
        };
        let count =
            selection.sectors.end.saturating_sub(selection.sectors.start) >> (source.shift - 9);
        if count < len as u64 && selection.before == u64::MAX {
            return self.dirty_blocks_in_range(source, selection, count as usize);
        }
        // Allocates without the lock. The length suffices, because the walk leaves out blocks that
        // became dirty after its begin.
        let mut blocks = DirtyBlocks::try_new(len.min(selection.most))?;
        while blocks.most > 0 && !walk.is_over() {
            let list = source.writes.dirty.lock();
            let mut is_last = false;
            for frame in list.piece(&self.frames, &mut walk) {
                let key = self.entry(frame).key();
                if selection.include == Include::Promising && !self.is_promising(frame) {
                    continue;
                }
                is_last = self.frames.header(frame).since() >= selection.before
                    || (selection.sectors.contains(&key.sector())
                        && !blocks.push(DirtyBlock { key, frame }));
                if is_last {
                    break;
                }
            }
            if is_last {
                walk.stop();
            }
        }
        Ok(blocks)
    }

    /// Returns whether a write of a dirty buffer is likely to succeed.
    fn is_promising(&self, frame: Frame) -> bool {
        self.frames.header(frame).tries() == 0
    }

    /// Returns the dirty blocks of the device that would be evicted next, from the end of the list
    /// that has the next victim. They stay on it. Releases the lock after a few visits each.
    fn due_blocks(
        &self,
        source: &Source,
        selection: &Selection,
    ) -> Result<DirtyBlocks, WriteError> {
        let mut blocks = DirtyBlocks::try_new(selection.most)?;
        let (mut visits, mut at) = (0..selection.most, None);
        while !visits.is_empty() {
            let cold = self.cold.lock();
            for _ in visits.by_ref().take(LOOKS as usize) {
                let Some(frame) = cold.policy.next_due(&cold.nodes, at) else { return Ok(blocks) };
                at = Some(frame);
                let entry = self.entry(frame);
                let (word, key) = (entry.word(), entry.key());
                let is_due = is_evictable_but_dirty(word) && word.used() == 0;
                if is_due && key.device() == source.id && self.is_promising(frame) {
                    blocks.push(DirtyBlock { key, frame });
                }
            }
        }
        Ok(blocks)
    }

    /// Does the work of [`dirty_blocks`](Self::dirty_blocks) for a range of fewer blocks than the
    /// dirty list has: looks up each block of the range.
    fn dirty_blocks_in_range(
        &self,
        source: &Source,
        selection: &Selection,
        count: usize,
    ) -> Result<DirtyBlocks, WriteError> {
        let mut blocks = DirtyBlocks::try_new(count.min(selection.most))?;
        for sector in selection.sectors.clone().step_by(1 << (source.shift - 9)) {
            let key = Key::new(source.id, sector);
            let word = self.table.find(key).and_then(|entry| entry.look(key));
            let Some(word) = word.filter(|word| word.has(DIRTY)) else { continue };
            if blocks.most == 0 || !blocks.push(DirtyBlock { key, frame: word.frame() }) {
                break;
            }
        }
        Ok(blocks)
    }
}
