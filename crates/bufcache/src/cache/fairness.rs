//! What keeps a full, slow or hung device from holding up the others of its cache.
//!
//! ```text
//!  dirty buffers:  | device A, hung: 1/2 of what may be dirty | B: 1/2 of the rest | C: ... | clean |
//! ```
//!
//! A cache with one device lets that have all buffers. Among several devices:
//!
//! 1. Once another device has asked for a buffer, a device has at most as many dirty bytes as it leaves free to the others, of what may be dirty in all.
//!    One device that is stuck so has half of that, two have a third each, and some is always free. A device
//!    may always have [`FLOOR`], for when another took all before this one was attached.
//! 2. A device whose last write failed gets no more dirty buffers while it has some. Its blocks can be written
//!    past the cache; a write that succeeds, there or from the cache, lifts this.
//! 3. Where the device's buffers are held back by a user, and no write of it is in flight, it may have more: the
//!    device is not stuck.
//! 4. Once another device has asked for a buffer, the tasks of a device have at most an equal share of the cache in
//!    loads that have not ended: so a device that hangs leaves the others theirs. A thread that waits has one.
//! 5. A thread writes back buffers of the device that it works on, and of no other: for those it wakes the
//!    cleaner.

use std::time::Instant;

use percpu::sync::atomic::Ordering;
use percpu::sync::{Arc, thread};

use super::Shared;
use super::back::Tries;
use crate::engine::turn_engine;
use crate::error::GetError;
use crate::source::Source;
use crate::word::Key;

/// A device may have this part of the cache dirty, whatever the others have. A guess.
const FLOOR: usize = 64;

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

    /// Notes that the device wants buffers.
    pub(super) fn note_want(&self, source: &Source) {
        if !source.writes.load.set_wants() {
            self.wanting.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether another device wants buffers, too.
    pub(super) fn is_shared(&self, source: &Source) -> bool {
        let own = usize::from(source.writes.load.wants());
        self.wanting.load(Ordering::Relaxed) > own
    }

    /// Whether a thread that dirties a block writes others first.
    pub(crate) fn must_clean(&self, source: &Source) -> bool {
        self.is_too_dirty() && !self.is_shared(source)
    }

    /// Before a thread dirties a block: writes some of the device's buffers if too many are dirty, and waits
    /// for others to.
    pub(super) fn limit_dirty(&self, source: &Arc<Source>, key: Key) -> Result<(), GetError> {
        if self.must_clean(source) {
            self.clean_some_for(Some(source));
        }
        let mut since = None;
        while !self.may_dirty(source, key) {
            let load = &source.writes.load;
            let tries = if load.failing().is_some() { Tries::All } else { Tries::Most };
            let done = self.clean_some_of(source, tries);
            if done.written > 0 {
                continue;
            }
            source.check_write()?;
            let is_over = since.get_or_insert_with(Instant::now).elapsed() >= self.patience;
            // A write by another thread tells whether the device still fails.
            let is_told = done.error.is_some() || !done.overlapped || is_over;
            if let Some(errno) = load.failing().filter(|_| is_told) {
                return Err(GetError::Io { errno, block: source.block(key) });
            }
            if !load.is_writing() {
                return Ok(()); // they are held back, by a user or behind the log: the device is not stuck
            }
            if is_over {
                return Err(GetError::NoFreeBuffers);
            }
            // Other threads give it buffers, or this thread's engine.
            turn_engine();
            #[cfg(not(any(offlock_loom, offlock_shuttle)))]
            thread::sleep(super::evict::PAUSE);
            #[cfg(any(offlock_loom, offlock_shuttle))]
            thread::yield_now();
        }
        Ok(())
    }

    /// Whether a task may begin one more load of the device.
    pub(super) fn may_load(&self, source: &Source) -> bool {
        let devices = self.wanting.load(Ordering::Relaxed); // a hint
        let share = self.room() / devices.max(1);
        devices <= 1 || source.in_flight.count() << source.shift < share.max(1 << source.shift)
    }

    /// Whether the block may become dirty now, or is dirty.
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
        // Without dirty buffers no write is left whose success would say that the device fails no more.
        let is_failing = load.failing().is_some() && load.dirty_bytes() > 0;
        let may = !is_failing && (!self.is_shared(source) || is_within());
        may || self.is_dirty(key)
    }

    /// Writes some buffers because a miss of the device needs one. Returns how many.
    pub(super) fn clean_some_for(&self, source: Option<&Arc<Source>>) -> usize {
        match source {
            Some(source) if !self.has_one_device() => {
                if self.dirty_bytes() == 0 {
                    return 0;
                }
                self.hurry_cleaner();
                self.clean_some_of(source, Tries::Most).written
            }
            _ => self.clean_some(),
        }
    }
}
