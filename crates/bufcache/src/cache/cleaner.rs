//! Writes back what has been dirty for a while, and what too much of is dirty: in the rounds of the
//! [pool](super::pool), and by threads that need a buffer.

use std::time::Duration;

use percpu::sync::atomic::Ordering;
use percpu::sync::{Arc, coarse_clock};

use super::Shared;
use super::back::Done;
use super::task::{Task, Tries};
use crate::source::Source;
use crate::wait::{Mode, now};

/// Most buffers that a thread writes that needs one. A guess: enough that the next few find some.
const SOME: usize = 64;
/// Sectors that were written and never synced may be in so many ranges, and in four for each buffer: then the cleaner
/// syncs. Each takes some 30 bytes, and a sync too early makes the device write what others are about to overwrite.
const MOST_EXTENTS: usize = 16 << 10;

/// When it writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// What has been dirty for so long.
    pub(crate) age: Duration,
    /// A share of the capacity in 256 parts: it begins to write when more is dirty.
    pub(crate) begin: u32,
    /// A share in 256 parts: while more is dirty, writers wait for write-backs.
    pub(crate) most: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { age: Duration::from_secs(5), begin: 26, most: 192 }
    }
}

impl Shared {
    /// Milliseconds of the cache's life.
    pub(super) fn now(&self) -> u64 {
        (coarse_clock() - self.since) / 1_000_000
    }

    pub(crate) fn dirty_bytes(&self) -> usize {
        self.dirty_bytes.load(Ordering::Relaxed) // a measure
    }

    /// One round for one device.
    pub(super) fn clean(&self, source: &Arc<Source>, limits: Limits, urgent: bool) {
        let before = match limits.age.as_millis() {
            _ if urgent => u64::MAX,
            age => self.now().saturating_sub(u64::try_from(age).unwrap_or(u64::MAX)),
        };
        let task = Task { before, wait: false, tries: Tries::Most, ..Task::all() };
        // What fails is remembered by the device, for its handles.
        now(self.write_back(source, &task, Mode::Thread));
        now(self.limit_extents(source, Mode::Thread));
    }

    /// Syncs a device whose unsynced ranges are so many that they take much memory. A failure poisons the
    /// device, so later calls report it.
    pub(super) async fn limit_extents(&self, source: &Arc<Source>, mode: Mode) {
        if self.has_many_extents(source) {
            let _ = self.sync_device(source, source.writes.group.losses(), mode).await;
        }
    }

    /// Whether a sync is due, because what is not durable is in many parts.
    pub(super) fn has_many_extents(&self, source: &Source) -> bool {
        // The devices share what the cache allows: about 3 % of its memory.
        let devices = self.devices.load(Ordering::Relaxed).max(1); // a hint
        let most = MOST_EXTENTS.max(4 * self.frames.units() / devices);
        source.writes.unsynced(|unsynced| unsynced.written.len()) > most
    }

    /// Writes a few buffers of the devices in turn. Returns how many.
    pub(super) fn clean_some(&self) -> usize {
        if self.dirty_bytes() == 0 {
            return 0;
        }
        for tries in [Tries::Promising, Tries::Most] {
            let task = Task { most: SOME, wait: false, tries, ..Task::all() };
            let mut at = 0;
            while let Some(source) = self.pool.dirty(at) {
                let written = now(self.write_back(&source, &task, Mode::Thread)).written;
                if written > 0 {
                    return written;
                }
                at += 1;
            }
        }
        0
    }

    /// Writes a few buffers of one device: those whose write is likely to succeed, and if none was written others,
    /// as `tries` says.
    pub(super) fn clean_some_of(&self, source: &Arc<Source>, tries: Tries) -> Done {
        let task = Task { most: SOME, wait: false, tries: Tries::Promising, ..Task::all() };
        let done = now(self.write_back(source, &task, Mode::Thread));
        if done.written > 0 {
            return done;
        }
        now(self.write_back(source, &Task { tries, ..task }, Mode::Thread))
    }

    /// Writes the buffers of a device that would be evicted next if they were not dirty, for a thread
    /// that needs a buffer. Returns the number.
    pub(super) fn clean_due(&self, source: &Arc<Source>) -> usize {
        let tries = Tries::Promising;
        let task = Task { most: SOME, wait: false, tries, is_due: true, ..Task::all() };
        now(self.write_back(source, &task, Mode::Thread)).written
    }

    /// Whether so much is dirty that some has to be written before more becomes dirty. If it is less, but
    /// enough to begin, wakes the cleaner.
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

    /// The most bytes that may be dirty.
    pub(super) fn most_dirty(&self) -> usize {
        (self.room() as u64 * u64::from(self.pool.limits.most) / 256) as usize
    }
}
