//! The cleaner: writes back buffers that have been dirty for long, or because too many are dirty.
//! Runs in the rounds of the [pool](super::pool), and in threads that need a buffer.

use std::time::Duration;

use offlock_sync::atomic::Ordering;
use offlock_sync::{Arc, coarse_clock};

use super::Shared;
use super::back::Summary;
use super::selection::{Include, Selection};
use crate::source::Source;
use crate::wait::{Mode, poll_ready};

/// The most buffers that a thread writes if it needs one. A guess: enough that the next few misses
/// find clean ones.
const SOME: usize = 64;
/// The cleaner syncs a device once its unsynced sectors are in more ranges than this, and in more
/// than four for each buffer. A range takes about 30 bytes. An earlier sync would make the device
/// write blocks that are about to be overwritten.
const MOST_EXTENTS: usize = 16 << 10;

/// When the cleaner writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// A buffer that has been dirty for this long is written.
    pub(crate) age: Duration,
    /// The share of the capacity, in parts of 256, above which all dirty buffers are written.
    pub(crate) begin: u32,
    /// The share of the capacity, in parts of 256, above which writers wait for write-backs.
    pub(crate) most: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { age: Duration::from_secs(5), begin: 26, most: 192 }
    }
}

impl Shared {
    /// Returns the milliseconds since the cache was made.
    pub(super) fn now(&self) -> u64 {
        (coarse_clock() - self.since) / 1_000_000
    }

    pub(crate) fn dirty_bytes(&self) -> usize {
        // Ordering: Relaxed; see `list_dirty`.
        self.dirty_bytes.load(Ordering::Relaxed)
    }

    /// Writes the buffers of a device that are due in this round: all dirty ones if it is `urgent`,
    /// otherwise those that are old enough.
    pub(super) fn clean(&self, source: &Arc<Source>, limits: Limits, urgent: bool) {
        let before = match limits.age.as_millis() {
            _ if urgent => u64::MAX,
            age => self.now().saturating_sub(u64::try_from(age).unwrap_or(u64::MAX)),
        };
        let selection =
            Selection { before, wait: false, include: Include::NotGivenUp, ..Selection::all() };
        // The device remembers an error for its handles.
        poll_ready(self.write_back(source, &selection, Mode::Thread));
        poll_ready(self.limit_extents(source, Mode::Thread));
    }

    /// Syncs a device if its unsynced sectors are in so many ranges that these take much memory. A
    /// failure poisons the device, so later calls report it.
    pub(super) async fn limit_extents(&self, source: &Arc<Source>, mode: Mode) {
        if self.has_many_extents(source) {
            let _ = self.sync_device(source, source.writes.group.losses(), mode).await;
        }
    }

    /// Returns whether a sync is due because the unsynced sectors are in many ranges.
    pub(super) fn has_many_extents(&self, source: &Source) -> bool {
        // The devices share the limit of the cache, which is about 3 % of its memory.
        let devices = self.devices.load(Ordering::Relaxed).max(1); // a hint
        let most = MOST_EXTENTS.max(4 * self.frames.count() / devices);
        source.writes.unsynced(|unsynced| unsynced.written.len()) > most
    }

    /// Writes a few buffers of the first device that has any that can be written. Returns the
    /// number.
    pub(super) fn clean_some(&self) -> usize {
        if self.dirty_bytes() == 0 {
            return 0;
        }
        for include in [Include::Promising, Include::NotGivenUp] {
            let selection = Selection { most: SOME, wait: false, include, ..Selection::all() };
            let mut at = 0;
            while let Some(source) = self.pool.nth_dirty(at) {
                let written =
                    poll_ready(self.write_back(&source, &selection, Mode::Thread)).written;
                if written > 0 {
                    return written;
                }
                at += 1;
            }
        }
        0
    }

    /// Writes a few buffers of one device: those whose write is likely to succeed, or if none of
    /// these was written, those that `include` allows.
    pub(super) fn clean_some_of(&self, source: &Arc<Source>, include: Include) -> Summary {
        let selection =
            Selection { most: SOME, wait: false, include: Include::Promising, ..Selection::all() };
        let summary = poll_ready(self.write_back(source, &selection, Mode::Thread));
        if summary.written > 0 {
            return summary;
        }
        poll_ready(self.write_back(source, &Selection { include, ..selection }, Mode::Thread))
    }

    /// Writes the buffers of a device that would be evicted next if they were clean, for a thread
    /// that needs a buffer. Returns their number.
    pub(super) fn clean_due(&self, source: &Arc<Source>) -> usize {
        let include = Include::Promising;
        let selection =
            Selection { most: SOME, wait: false, include, is_due: true, ..Selection::all() };
        poll_ready(self.write_back(source, &selection, Mode::Thread)).written
    }

    /// Returns whether dirty buffers have to be written before another becomes dirty. If fewer are
    /// dirty, but enough for the cleaner to begin, wakes it.
    pub(super) fn is_too_dirty(&self) -> bool {
        let dirty = self.dirty_bytes() as u64 * 256;
        let capacity = self.room() as u64;
        let limits = self.pool.limits;
        let too_dirty = dirty > capacity * u64::from(limits.most);
        if !too_dirty && dirty > capacity * u64::from(limits.begin) {
            self.pool.hurry();
        }
        too_dirty
    }

    pub(super) fn hurry_cleaner(&self) {
        self.pool.hurry();
    }

    /// Returns the most bytes that may be dirty.
    pub(super) fn most_dirty(&self) -> usize {
        (self.room() as u64 * u64::from(self.pool.limits.most) / 256) as usize
    }
}
