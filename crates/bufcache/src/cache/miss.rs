//! A block that is not there, or not yet.
//!
//! # The end of a load
//!
//! A [`Load`](super::Load) publishes the bytes, or hides the entry and stores the reason. A requester that
//! comes meanwhile pins the entry and waits; the last pin of a failed load gives the frame back.

use std::mem::{self, ManuallyDrop};
use std::time::Duration;

use percpu::sync::atomic::{Ordering, fence};
use percpu::sync::{Arc, check, hint, step, thread};

use super::evict::{BufferWait, Search};
use super::write::{Fill, Got};
use super::{Held, Reuse, Shared};
use crate::engine::{turn_engine, wait_by_engine};
use crate::error::{Failure, GetError};
use crate::frames::Frame;
use crate::frames::Place;
use crate::hazard;
use crate::source::Source;
use crate::word::{Entry, FAILED, IO, Key, MOST_PINS, STALE, WAITED, WRITE, Word};

/// A frame in hand that nobody else has; goes back when it is not used.
pub(super) struct Spare<'c> {
    cache: &'c Shared,
    pub(super) frame: Frame,
}

/// A pin of this thread on an entry. It goes also where a wait unwinds.
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

/// What a thread or task is given that asks for a block.
#[must_use = "it may be pinned"]
pub(crate) enum Entered {
    /// The buffer is there, and the caller's slot keeps it.
    There(Held),
    /// The place of an entry that is pinned for the caller: the block is being read or written, or its load has
    /// ended meanwhile.
    Pinned(Place),
    /// The block was not there. The caller fills the buffer.
    Locked(Held),
    /// The block may not be had now: it is being discarded.
    Excluded,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub(crate) class: u8,
    pub(crate) reuse: Reuse,
    /// What a block that is not there begins with.
    pub(crate) fill: Fill,
    /// The calling thread waits for a buffer, and for the block. A task does not.
    pub(crate) blocks: bool,
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
        let want = Want { class, reuse, fill, blocks: true };
        let mut rounds = 0;
        loop {
            match self.enter(source, key, want)? {
                Entered::There(held) => return Ok(Got::Shared(held)),
                Entered::Locked(held) => return Ok(Got::Locked(held)),
                Entered::Pinned(place) => {
                    let entry = self.table.entry(place);
                    return self.wait_for_load(source, key, entry).map(Got::Shared);
                }
                // The discard may be in this thread's engine.
                Entered::Excluded if turn_engine() => self.wait_a_moment(&mut rounds),
                Entered::Excluded => source.writes.excluded.wait(key.sector(), self.patience),
            }
        }
    }

    /// Looks a block up, and pins its entry if others read or write it. Inserts it if it is not there, and
    /// begins to read it.
    ///
    /// A frame is taken before the lock, one by each thread that misses, whichever of them inserts the block.
    pub(crate) fn enter(
        &self,
        source: &Arc<Source>,
        key: Key,
        want: Want,
    ) -> Result<Entered, GetError> {
        hazard::reserve()?;
        self.note_want(source);
        let mut spare = None;
        let mut wait = BufferWait::new(if want.blocks { self.patience } else { Duration::ZERO });
        let mut rounds = 0_u32;
        loop {
            if let Some(held) = self.hit(key, want.class, want.reuse) {
                return Ok(Entered::There(held));
            }
            source.check_read(key)?;
            let is_absent =
                |found: Option<&Entry>| check!("enter: the block is absent", found.is_none());
            if spare.is_none() && is_absent(self.table.find(key)) {
                if !want.blocks && !self.may_load(source) {
                    return Err(GetError::NoFreeBuffers);
                }
                spare = self.spare(want.class, wait.search);
                if spare.is_none() {
                    // The block may be in one of the buffers by the time that one is free.
                    self.wait_for_buffers(Some(source), &mut wait)?;
                    continue;
                }
            }
            let home = self.table.lock(key);
            let found = home.find();
            if spare.is_some() && is_absent(found) {
                if source.writes.excluded.has(key.sector()) {
                    drop(home); // before the spare frame: that is another lock
                    return Ok(Entered::Excluded);
                }
                let Some(spare) = spare.take() else { continue };
                let mut word = self.loading(spare.frame, key);
                let is_read = want.fill == Fill::Read;
                if is_read {
                    step!("enter: pin it for the requester", word = word.pinned_once_more());
                }
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
                if !is_read {
                    return self.create(source, key, frame).map(Entered::Locked);
                }
                let pinned = Pinned::new(self, self.table.entry(place));
                self.begin(source, key, frame, want.reuse, want.blocks);
                pinned.into_pin();
                return Ok(Entered::Pinned(place));
            }
            let Some(entry) = found else { continue };
            let word = entry.word();
            let is_marked = word.has(IO | WRITE);
            self.check_class(word, want.class)?;
            // A writer's guard, or a verifier or device that asks for the block it is at. A task goes on
            // with other work.
            if is_marked && want.blocks && hazard::named_by_me(entry) > 0 {
                return Err(GetError::WouldDeadlock);
            }
            if is_marked && word.pins() == MOST_PINS {
                return Err(GetError::TooManyPins);
            }
            if is_marked && entry.try_pin(word).is_ok() {
                drop(home);
                drop(spare); // others may want it meanwhile
                self.counters.get_locked_waited.add(1);
                return Ok(Entered::Pinned(self.frames.header(word.frame()).place()));
            }
            drop(home);
            // Another thread takes it apart, or has changed it.
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
        turn_engine();
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

    /// Puts a block into the table that is not there, as being read; unless that would have to wait for
    /// a buffer.
    pub(super) fn insert_load(&self, source: &Source, key: Key, class: u8) -> Option<Frame> {
        self.note_want(source);
        let spare = self.spare(class, Search::Short)?;
        let home = self.table.lock(key);
        let is_free = home.find().is_none() && !source.writes.excluded.has(key.sector());
        let place = if is_free { home.insert(self.loading(spare.frame, key)) } else { None };
        if let Some(place) = place {
            self.frames.header(spare.frame).set_place(place);
        }
        drop(home); // before a spare frame goes back, which is another lock
        place?;
        self.counters.get.add(1);
        self.counters.miss_locked.add(1);
        Some(spare.into_frame())
    }

    /// Gives what was just put into the table to the caller, to fill: it has what its frame had.
    pub(super) fn create(&self, source: &Source, key: Key, frame: Frame) -> Result<Held, GetError> {
        let entry = self.entry(frame);
        let slot = match hazard::name(entry, self.order) {
            Ok(slot) => slot,
            Err(_) => return Err(self.fail(source, key, frame, Failure::NoMemory, 0)),
        };
        self.admit(frame, key, Reuse::Likely);
        self.frames.writing(frame);
        // Before anybody finds it there: what is refused now was never in the cache.
        entry.change(WRITE, 0);
        // Ordering: SeqCst, against the fence of who closes the device; see `close`.
        fence(Ordering::SeqCst);
        if source.writes.refuses_writers() {
            slot.clear();
            return Err(self.fail(source, key, frame, Failure::Closed, 0));
        }
        entry.publish_locked();
        Ok(Held { slot, frame })
    }

    /// Takes a load that failed out of the table, and fails its waiters. `own` of the pins beside the load's
    /// are the calling thread's.
    pub(super) fn fail(
        &self,
        source: &Source,
        key: Key,
        frame: Frame,
        failure: Failure,
        own: u64,
    ) -> GetError {
        let entry = self.entry(frame);
        let header = self.frames.header(frame);
        header.set_failure(failure.code());
        self.withdraw(frame);
        let home = self.table.lock(key);
        home.hide(header.place());
        let before = entry.change(STALE | FAILED, IO | WRITE | WAITED);
        drop(home);
        let others = before.pins() > 1 + own;
        if others || before.has(WAITED) || self.has_wakers(frame) {
            step!("fail: wake those who wait", self.wake_waiters(frame));
        }
        self.unpin(entry);
        failure.of(source.block(key))
    }

    /// Sleeps until the load is over that keeps the entry, which this thread has pinned.
    fn wait_for_load(&self, source: &Source, key: Key, entry: &Entry) -> Result<Held, GetError> {
        let _pinned = Pinned::new(self, entry);
        let frame = entry.word().frame();
        if entry.word().has(IO | WRITE) {
            self.sleep_for_load(entry)?;
        }
        if entry.word().has(FAILED) {
            let failure = Failure::from_code(self.frames.header(frame).failure());
            return Err(failure.of(source.block(key)));
        }
        // The pin keeps it until the slot is seen: `unpin` orders the two.
        let named = hazard::name(entry, self.order).map_err(GetError::from);
        self.frames.reading(frame);
        named.map(|slot| Held { slot, frame })
    }

    /// Sleeps until the entry is neither read nor written.
    fn sleep_for_load(&self, entry: &Entry) -> Result<(), GetError> {
        let header = self.frames.header(entry.word().frame());
        let mut since = None;
        if header.is_claimed_by_me() {
            // It may have the load still, or its engine has it; nobody else need end it.
            let mut rounds = 16;
            while entry.word().has(IO) {
                self.pause(&mut rounds, &mut since).map_err(|_| GetError::WouldDeadlock)?;
                turn_engine();
            }
        }
        // Another thread may wait for what this one's engine has begun.
        step!(
            "wait: turn the engine of this thread",
            wait_by_engine(|context| { self.poll_marks(header.place(), IO, context).is_ready() })
        );
        loop {
            let seen = header.loaded.load();
            let word = entry.word();
            if !word.has(IO | WRITE) {
                return Ok(());
            }
            if word.has(WRITE) {
                // A thread's guard, which may wait for one of ours.
                let left = self.time_left(&mut since)?;
                header.sleep(seen, left);
                continue;
            }
            // The cache's threads that read the device may all wait for this one.
            if let Some(load) = self.pool.take_queued(entry.key().device(), word.frame()) {
                load.read_here(1);
                continue;
            }
            header.loaded.wait(seen);
        }
    }

    /// Makes a pin of a slot. Returns the place of its entry.
    pub(crate) fn pin_held(&self, Held { slot, frame }: Held) -> Result<Place, GetError> {
        let pinned = self.entry(frame).pin();
        let place = self.frames.header(frame).place();
        slot.clear();
        pinned?;
        Ok(place)
    }

    /// Takes a pin off the entry at `place`.
    pub(crate) fn unpin_place(&self, place: Place) {
        self.unpin(self.table.entry(place));
    }

    /// Takes a pin off; the last one of a failed load gives its frame back.
    pub(crate) fn unpin(&self, entry: &Entry) {
        let left = entry.unpin();
        if check!("unpin: it was the last pin", left.pins() == 0) && left.has(FAILED) {
            let frame = left.frame();
            entry.free();
            self.give(frame);
        }
    }
}
