//! Loads that the caller fills.

use std::ops::Range;

use offlock_sync::Arc;

use super::Shared;
use super::load::Load;
use crate::error::{Failure, GetError};
use crate::frames::Place;
use crate::source::Source;
use crate::wait::Mode;
use crate::word::{IO, Key, MOST_PINS, WRITE};

/// The result of one attempt to invalidate a block.
pub(crate) enum Attempt {
    /// The block is not cached any more.
    NotCached,
    /// The block is being loaded or written. The entry is pinned for the caller.
    Pinned(Place),
    /// Another thread takes the buffer apart, or has just done so.
    Busy,
}

impl Shared {
    /// Begins a load of a block that is not cached, unless that has to wait.
    pub(crate) fn claim(&self, source: &Arc<Source>, key: Key) -> Result<Option<Load>, GetError> {
        source.check_read(key)?;
        if self.is_cached(key) {
            return Ok(None);
        }
        self.note_want(source);
        if !self.may_load(source) || !self.is_worth_a_buffer(key) {
            return Ok(None);
        }
        let Some(frame) = self.insert_load(source, key) else { return Ok(None) };
        let Some(load) = Load::new(source, key, frame, false) else {
            self.fail(source, key, frame, Failure::Closed, 0);
            return Err(GetError::Closed);
        };
        self.admit(frame, key);
        self.frames.header(frame).set_claimed();
        self.frames.writing(frame);
        self.counters.get_read.add(1);
        source.note_load(key);
        Ok(Some(load))
    }

    /// Invalidates a block for a task, unless that has to wait.
    pub(crate) fn invalidate_or_pin(
        &self,
        source: &Arc<Source>,
        key: Key,
    ) -> Result<Attempt, GetError> {
        if self.try_invalidate(Some(source), key, 0, Mode::Task)?.is_some() {
            return Ok(Attempt::NotCached);
        }
        let home = self.table.lock(key);
        let Some(entry) = home.find() else { return Ok(Attempt::Busy) };
        let word = entry.word();
        if !word.has(IO | WRITE) || word.pins() == MOST_PINS || entry.try_pin(word).is_err() {
            return Ok(Attempt::Busy);
        }
        drop(home);
        Ok(Attempt::Pinned(self.frames.header(word.frame()).place()))
    }

    /// Returns the next cached block of a device within `sectors`, from the entry `place` on, and
    /// the number of the entry after it.
    pub(crate) fn next_cached(
        &self,
        device: u16,
        sectors: &Range<u64>,
        place: Place,
    ) -> Option<(Key, Place)> {
        (place..self.table.places()).find_map(|place| {
            let key = self.table.entry(place).key();
            let wanted = key.device() == device && sectors.contains(&key.sector());
            wanted.then_some((key, place + 1))
        })
    }

    /// Returns the number of entries that [`next_cached`](Self::next_cached) visits.
    pub(crate) fn places(&self) -> Place {
        self.table.places()
    }
}
