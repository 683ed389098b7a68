//! A block that is not there, or not yet.
//!
//! # Who ends a load
//!
//! The thread that put the entry into the table, whatever happens to it: it publishes the bytes, or
//! hides the entry and says why. Whoever comes meanwhile pins the entry and sleeps; the last pin of a
//! failed load gives the frame back.

use std::mem::{self, ManuallyDrop};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use percpu::sync::atomic::{Ordering, fence};
use percpu::sync::{Arc, hint, mutant, thread};

use super::evict::{BufferWait, Search};
use super::load::Asked;
use super::write::{Fill, Got};
use super::{Held, Reuse, Shared};
use crate::error::{Failure, GetError};
use crate::frames::Frame;
use crate::hazard;
use crate::source::Source;
use crate::table::Place;
use crate::word::{EVICT, Entry, FAILED, IO, Key, MOST_PINS, STALE, WAITED, WRITE, Word};

/// A frame in hand that nobody else has; goes back when it is not used.
pub(super) struct Spare<'c> {
    cache: &'c Shared,
    pub(super) frame: Frame,
}

/// A pin of this thread on an entry. It goes also where a callback on the thread's engine panics.
pub(super) struct Pinned<'c> {
    cache: &'c Shared,
    entry: &'c Entry,
}

impl<'c> Pinned<'c> {
    /// Takes over a pin that the entry has already.
    pub(super) fn new(cache: &'c Shared, entry: &'c Entry) -> Self {
        Self { cache, entry }
    }

    /// Leaves the pin to the caller.
    pub(super) fn into_pin(self) {
        mem::forget(self);
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.cache.unpin(self.entry);
    }
}

/// A planted bug: the entry of a block that is being evicted is as good as none.
fn is_overlooked(entry: &Entry) -> bool {
    mutant("insert-beside-a-dying-entry") && entry.word().has(EVICT)
}

impl Spare<'_> {
    pub(super) fn into_frame(self) -> Frame {
        ManuallyDrop::new(self).frame
    }
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        self.cache.give(self.frame);
    }
}

impl Shared {
    /// The buffer of a block, read from the device if it is not there.
    #[cold]
    #[inline(never)]
    pub(crate) fn miss(
        &self,
        source: &Arc<Source>,
        key: Key,
        class: u8,
        reuse: Reuse,
        fill: Fill,
    ) -> Result<Got, GetError> {
        if fill == Fill::Read && source.device.begins_reads() {
            let place = loop {
                match self.ask(source, key, class, reuse, self.patience)? {
                    Asked::Pinned(place) => break place,
                    Asked::Excluded => source.writes.excluded.wait(key.sector(), self.patience),
                }
            };
            return self.wait_for_load(source, key, self.table.entry(place)).map(Got::Shared);
        }
        hazard::reserve()?;
        self.note_want(source);
        let mut spare = None;
        let mut wait = BufferWait::new(self.patience);
        let mut rounds = 0_u32;
        loop {
            if let Some(held) = self.hit(key, class, reuse) {
                return Ok(Got::Shared(held));
            }
            source.check_read(key)?;
            let absent = self.table.find(key).is_none_or(is_overlooked);
            if spare.is_none() && absent {
                // Before the lock. One for each thread that misses, whoever wins.
                let taken = if mutant("miss-waits-for-a-buffer-only") {
                    Some(self.take_frame(source, class)?)
                } else {
                    self.try_take_frame(class, wait.search)
                };
                let Some(frame) = taken else {
                    // Whoever has the buffers may have the block in one of them by now.
                    self.wait_for_buffers(Some(source), &mut wait)?;
                    continue;
                };
                self.counters.create.add(1);
                spare = Some(Spare { cache: self, frame });
            }
            let home = self.table.lock(key);
            let found = if spare.is_some() && mutant("insert-without-a-second-look") {
                None
            } else {
                home.find().filter(|entry| !is_overlooked(entry))
            };
            let Some(entry) = found else {
                if source.writes.excluded.has(key.sector()) {
                    drop(home);
                    drop(spare.take()); // others may want it meanwhile
                    source.writes.excluded.wait(key.sector(), self.patience);
                    continue;
                }
                let Some(spare) = spare.take() else { continue };
                let word = Word::loading(spare.frame);
                let Some(place) = home.insert(word) else {
                    // There are twice as many places as buffers; those of dying entries may be taken
                    // for a moment.
                    drop(home); // before the spare frame: that is another lock
                    continue;
                };
                let frame = spare.into_frame();
                self.frames.header(frame).set_place(place);
                drop(home);
                self.counters.miss_locked.add(1);
                return match fill {
                    Fill::Read => self.load(source, key, frame, reuse).map(Got::Shared),
                    Fill::Caller => self.create(source, key, frame).map(Got::Locked),
                };
            };
            let word = entry.word();
            self.check_class(word, class)?;
            // A writer's guard, or a verifier or device that asks for the block it is at.
            if word.has(IO | WRITE) && hazard::named_by_me(entry) > 0 {
                return Err(GetError::WouldDeadlock);
            }
            if word.has(IO | WRITE) {
                if word.pins() == MOST_PINS {
                    return Err(GetError::TooManyPins);
                }
                if entry.try_pin(word).is_ok() {
                    drop(home);
                    drop(spare); // others may want it meanwhile
                    self.counters.get_locked_waited.add(1);
                    return self.wait_for_load(source, key, entry).map(Got::Shared);
                }
                continue;
            }
            drop(home);
            // Somebody takes it apart, or has it already.
            self.wait_a_moment(&mut rounds);
        }
    }

    /// Lets another thread finish its change of an entry.
    pub(super) fn wait_a_moment(&self, rounds: &mut u32) {
        *rounds = rounds.saturating_add(1);
        if *rounds < 16 {
            return hint::spin_loop();
        }
        // It may be read by this thread's own engine.
        #[cfg(feature = "aio-reap")]
        crate::device::turn_engine();
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        if *rounds > 64 {
            // It is being read: a matter of the device's time.
            return thread::sleep(super::evict::PAUSE);
        }
        thread::yield_now();
    }

    /// A frame in hand, if there is one to be had at once.
    pub(super) fn spare(&self, class: u8, search: Search) -> Option<Spare<'_>> {
        let frame = self.try_take_frame(class, search)?;
        self.counters.create.add(1);
        Some(Spare { cache: self, frame })
    }

    /// Whether the block in that state has the length asked for.
    pub(super) fn check_class(&self, word: Word, class: u8) -> Result<(), GetError> {
        if word.frame().class() == class {
            return Ok(());
        }
        Err(GetError::LengthMismatch {
            there: 1 << self.frames.shift(word.frame()),
            asked: 1 << self.frames.shift(Frame::new(0, class)),
        })
    }

    /// Reads a block that is not there, for nobody; unless it would have to wait for a buffer.
    pub(crate) fn read_ahead(&self, source: &Source, key: Key, class: u8) {
        if self.is_cached(key) || hazard::reserve().is_err() || source.check_read(key).is_err() {
            return;
        }
        let Some(frame) = self.insert_load(source, key, class) else { return };
        if let Ok(held) = self.load(source, key, frame, Reuse::Likely) {
            held.slot.clear();
        }
    }

    /// Puts a block into the table that is not there, as being read; unless that would have to wait for
    /// a buffer.
    pub(super) fn insert_load(&self, source: &Source, key: Key, class: u8) -> Option<Frame> {
        self.note_want(source);
        let spare = self.spare(class, Search::Short)?;
        let home = self.table.lock(key);
        let place = match home.find() {
            Some(_) if !mutant("ahead-inserts-without-a-look") => None,
            None if source.writes.excluded.has(key.sector()) => None,
            _ => home.insert(Word::loading(spare.frame)),
        };
        if let Some(place) = place {
            self.frames.header(spare.frame).set_place(place);
        }
        drop(home); // before a spare frame goes back, which is another lock
        place?;
        self.counters.get.add(1);
        self.counters.miss_locked.add(1);
        Some(spare.into_frame())
    }

    /// Reads what was just put into the table.
    fn load(
        &self,
        source: &Source,
        key: Key,
        frame: Frame,
        reuse: Reuse,
    ) -> Result<Held, GetError> {
        let entry = self.entry(frame);
        let slot = match hazard::name(entry, self.order) {
            Ok(slot) => slot,
            Err(_) => return Err(self.fail(source, key, frame, Failure::NoMemory)),
        };
        self.admit(frame, key, reuse);
        self.frames.writing(frame);
        let mut bytes = self.frames.bytes(frame);
        // SAFETY: invariant 1 of `frames`: the frame is this thread's until the entry is published.
        let bytes = unsafe { bytes.as_mut() };
        self.counters.get_read.add(1);
        source.note_load(key);
        let read = catch_unwind(AssertUnwindSafe(|| source.read(key, bytes)));
        let failure = match read {
            Ok(Ok(())) => {
                self.publish(frame);
                return Ok(Held { slot, frame });
            }
            Ok(Err(failure)) => failure,
            Err(panic) => {
                slot.clear();
                self.fail(source, key, frame, Failure::Panicked);
                resume_unwind(panic);
            }
        };
        slot.clear();
        Err(self.fail(source, key, frame, failure))
    }

    /// Gives what was just put into the table to the caller, to fill: it has what its frame had.
    pub(super) fn create(&self, source: &Source, key: Key, frame: Frame) -> Result<Held, GetError> {
        let entry = self.entry(frame);
        let slot = match hazard::name(entry, self.order) {
            Ok(slot) => slot,
            Err(_) => return Err(self.fail(source, key, frame, Failure::NoMemory)),
        };
        self.admit(frame, key, Reuse::Likely);
        self.frames.writing(frame);
        // Before anybody finds it there: what is refused now was never in the cache.
        entry.change(WRITE, 0);
        // Ordering: SeqCst, against the fence of who closes the device; see `close`.
        fence(Ordering::SeqCst);
        if source.writes.refuses_writers() {
            slot.clear();
            return Err(self.fail(source, key, frame, Failure::Closed));
        }
        entry.publish_locked();
        Ok(Held { slot, frame })
    }

    /// Takes a load that failed out of the table, and tells those who wait.
    pub(super) fn fail(
        &self,
        source: &Source,
        key: Key,
        frame: Frame,
        failure: Failure,
    ) -> GetError {
        let entry = self.entry(frame);
        let header = self.frames.header(frame);
        header.set_failure(failure.code());
        self.withdraw(frame);
        let home = self.table.lock(key);
        home.hide(header.place());
        let before = entry.change(STALE | FAILED, IO | WRITE | WAITED);
        drop(home);
        let waited_for = before.pins() > 1 || before.has(WAITED) || self.has_wakers(frame);
        if waited_for && !mutant("failed-load-wakes-nobody") {
            self.wake_waiters(frame);
        }
        self.unpin(entry);
        failure.of(source.block(key))
    }

    /// Sleeps until the load is over that keeps the entry, which this thread has pinned.
    fn wait_for_load(&self, source: &Source, key: Key, entry: &Entry) -> Result<Held, GetError> {
        let _pinned = Pinned::new(self, entry);
        let frame = entry.word().frame();
        let header = self.frames.header(frame);
        let mut since = None;
        if header.is_claimed_by_me() {
            // It may have the load still, or its engine has it; nobody else need end it.
            let mut rounds = 16;
            while entry.word().has(IO) {
                self.pause(&mut rounds, &mut since).map_err(|_| GetError::WouldDeadlock)?;
                #[cfg(feature = "aio-reap")]
                crate::device::turn_engine();
            }
        }
        // Another thread may wait for what this one's engine has begun.
        #[cfg(feature = "aio-reap")]
        if !mutant("wait-without-the-engine") {
            crate::device::wait_by_engine(|context| {
                self.poll_marks(header.place(), IO, context).is_ready()
            });
        }
        loop {
            let seen = header.loaded.load();
            let word = entry.word();
            if !word.has(IO | WRITE) {
                break;
            }
            if word.has(WRITE) {
                // A thread's guard, which may wait for one of ours.
                let left = self.time_left(&mut since)?;
                header.sleep(seen, left);
                continue;
            }
            header.loaded.wait(seen);
        }
        if entry.word().has(FAILED) {
            return Err(Failure::from_code(header.failure()).of(source.block(key)));
        }
        // The pin keeps it until the slot is seen: `unpin` orders the two.
        let named = hazard::name(entry, self.order).map_err(GetError::from);
        self.frames.reading(frame);
        named.map(|slot| Held { slot, frame })
    }

    /// Takes a pin off the entry at `place`.
    pub(crate) fn unpin_place(&self, place: Place) {
        self.unpin(self.table.entry(place));
    }

    /// Takes a pin off; the last one of a failed load gives its frame back.
    pub(crate) fn unpin(&self, entry: &Entry) {
        let left = entry.unpin();
        let is_last = left.pins() == 0 || mutant("failed-load-is-freed-by-each");
        if is_last && left.has(FAILED) {
            let frame = left.frame();
            entry.free();
            self.give(frame);
        }
    }
}
