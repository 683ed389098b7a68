//! Limits that keep a full, slow or hung device from delaying the other devices of its cache.
//!
//! ```text
//!  dirty buffers:  | device A, hung: 1/2 of what may be dirty | B: 1/2 of the rest | C: ... | clean |
//! ```
//!
//! The device of a cache with one device may use all buffers. Among several devices:
//!
//! 1. Once another device has asked for a buffer, a device has at most as many dirty bytes as are
//!    left of the cache's limit. So a device that hangs holds half of the limit, two hold a third
//!    each, and some is always left. A device may always have a [`FLOOR`]th of the cache dirty, in
//!    case another one took all before this one was attached.
//! 2. A device whose last write failed gets no more dirty buffers while it has some. Its blocks can
//!    be written past the cache. A write that succeeds, past the cache or from it, ends this.
//! 3. A device without a write in flight, whose buffers wait for their log, may have more: it does
//!    not hang.
//! 4. While another device is attached, the loads in flight that the tasks of a device have begun,
//!    and its claims, take at most an equal share of the cache. Of the devices that have not asked
//!    for a buffer at most [`QUIET`] count. A thread that blocks has one load at most.
//! 5. A thread writes back buffers of its own device only, and wakes the cleaner for the others.

use std::time::Instant;

use offlock_sync::atomic::Ordering;
use offlock_sync::{Arc, thread};

use super::Shared;
use super::selection::Include;
use crate::error::GetError;
use crate::source::Source;
use crate::word::Key;

/// A device may have the cache's size divided by this dirty, whatever the others have. A guess.
const FLOOR: usize = 64;
/// A share is reserved for at most this many devices that have not asked for a buffer. A guess:
/// several hung devices leave a part of the cache, and many idle ones cost a busy one little.
const QUIET: usize = 3;

impl Shared {
    pub(crate) fn add_device(&self) {
        self.devices.fetch_add(1, Ordering::Relaxed); // a hint, also below
    }

    pub(crate) fn remove_device(&self, source: &Source) {
        self.devices.fetch_sub(1, Ordering::Relaxed);
        if source.writes.load.wants() {
            self.wanting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn has_one_device(&self) -> bool {
        self.devices.load(Ordering::Relaxed) <= 1
    }

    /// Notes that the device has asked for a buffer.
    pub(super) fn note_want(&self, source: &Source) {
        if !source.writes.load.set_wants() {
            self.wanting.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns whether another device has asked for a buffer.
    pub(super) fn is_shared(&self, source: &Source) -> bool {
        let own = usize::from(source.writes.load.wants());
        self.wanting.load(Ordering::Relaxed) > own
    }

    /// Returns whether a thread that is about to dirty a block writes other blocks first.
    pub(crate) fn must_clean(&self, source: &Source) -> bool {
        self.is_too_dirty() && !self.is_shared(source)
    }

    /// Waits until a thread may dirty a block. Writes some of the device's buffers if too many are
    /// dirty.
    pub(super) fn limit_dirty(&self, source: &Arc<Source>, key: Key) -> Result<(), GetError> {
        if self.must_clean(source) {
            self.clean_some_for(Some(source));
        }
        let mut since = None;
        while !self.may_dirty(source, key) {
            let load = &source.writes.load;
            let include = if load.failing().is_some() { Include::All } else { Include::NotGivenUp };
            let summary = self.clean_some_of(source, include);
            if summary.written > 0 {
                continue;
            }
            source.check_write()?;
            let is_over = since.get_or_insert_with(Instant::now).elapsed() >= self.patience;
            // The result of another thread's write shows whether the device still fails.
            let is_told = summary.error.is_some() || !summary.overlapped || is_over;
            if let Some(errno) = load.failing().filter(|_| is_told) {
                return Err(GetError::Io { errno, block: source.block(key) });
            }
            if !load.is_writing() {
                // The blocks wait for their log: the device does not hang.
                return Ok(());
            }
            if is_over {
                return Err(GetError::NoFreeBuffers);
            }
            #[cfg(not(offlock_model))]
            thread::sleep(super::evict::PAUSE);
            #[cfg(offlock_model)]
            thread::yield_now();
        }
        Ok(())
    }

    /// Returns whether a task may begin one more load of the device, which has asked for a buffer.
    pub(super) fn may_load(&self, source: &Source) -> bool {
        let wanting = self.wanting.load(Ordering::Relaxed).max(1); // a hint, as the next
        let quiet = self.devices.load(Ordering::Relaxed).saturating_sub(wanting).min(QUIET);
        let share = (self.room() / (wanting + quiet)).max(1 << source.shift);
        wanting + quiet == 1 || source.in_flight.count() << source.shift < share
    }

    /// Returns whether the block may become dirty now, or is dirty already.
    pub(super) fn may_dirty(&self, source: &Source, key: Key) -> bool {
        if self.has_one_device() {
            return true;
        }
        let load = &source.writes.load;
        let is_within = || {
            let free = self.most_dirty().saturating_sub(self.dirty_bytes());
            let floor = (self.room() / FLOOR).max(1 << source.shift);
            load.dirty_bytes() < free.max(floor)
        };
        // Without dirty buffers no write is left that could succeed and end the refusal.
        let is_failing = load.failing().is_some() && load.dirty_bytes() > 0;
        let may = !is_failing && (!self.is_shared(source) || is_within());
        may || self.is_dirty(key)
    }

    /// Writes some dirty buffers because a miss of the device needs a buffer. Returns the number.
    pub(super) fn clean_some_for(&self, source: Option<&Arc<Source>>) -> usize {
        match source {
            Some(source) if !self.has_one_device() => {
                if self.dirty_bytes() == 0 {
                    return 0;
                }
                self.hurry_cleaner();
                self.clean_some_of(source, Include::NotGivenUp).written
            }
            _ => self.clean_some(),
        }
    }
}
