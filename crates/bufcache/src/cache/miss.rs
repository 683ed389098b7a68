//! Misses: blocks that are not cached, or are being loaded.
//!
//! # The end of a load
//!
//! A [`Load`](super::Load) publishes the bytes, or hides the entry and stores the reason. A
//! requester that comes meanwhile pins the entry and waits; the last pin of a failed load gives the
//! frame back.

use std::mem::{self, ManuallyDrop};
use std::time::Duration;

use offlock_sync::atomic::{Ordering, fence};
use offlock_sync::{Arc, check, hint, step, thread};

use super::evict::{BufferWait, Search};
use super::write::{BlockRequest, Fill, MissResult, Wait};
use super::{Protected, Shared};
use crate::engine::refuses_wait;
use crate::error::{Failure, GetError};
use crate::frames::Frame;
use crate::frames::Place;
use crate::hazard;
use crate::source::Source;
use crate::wait::block_on;
use crate::word::{BACK, Entry, FAILED, IO, Key, MOST_PINS, STALE, WAITED, WRITE};

/// A frame that this thread owns. Its drop gives the frame back.
pub(super) struct Spare<'c> {
    cache: &'c Shared,
    pub(super) frame: Frame,
}

/// A pin of this thread on an entry. Its drop unpins, also in a panic.
pub(super) struct Pinned<'c> {
    cache: &'c Shared,
    entry: &'c Entry,
}

impl<'c> Pinned<'c> {
    /// Takes over a pin that the entry has.
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

/// The result of a request for a block.
#[must_use = "it may be pinned"]
pub(crate) enum EnterResult {
    /// The buffer is cached, and a slot of the caller protects it.
    Cached(Protected),
    /// The number of an entry that is pinned for the caller. The block is being read or written, or
    /// its load has just ended.
    Pinned(Place),
    /// The block was not cached. The caller fills the buffer.
    Locked(Protected),
    /// The block is being discarded.
    Excluded,
}

impl Shared {
    /// Returns the buffer of a block, read from the device if it is not cached. With [`Wait::Load`] it
    /// fails with [`GetError::WouldBlock`] if a writer has the block.
    #[cold]
    #[inline(never)]
    pub(crate) fn miss(
        &self,
        source: &Arc<Source>,
        key: Key,
        want: BlockRequest,
    ) -> Result<MissResult, GetError> {
        loop {
            match self.enter(source, key, want)? {
                EnterResult::Cached(buffer) => return Ok(MissResult::Shared(buffer)),
                EnterResult::Locked(buffer) => return Ok(MissResult::Locked(buffer)),
                EnterResult::Pinned(place) => {
                    let entry = self.table.entry(place);
                    return self
                        .wait_for_load(source, key, entry, want.wait)
                        .map(MissResult::Shared);
                }
                EnterResult::Excluded => {
                    if !source.may_wait() {
                        return Err(GetError::WouldDeadlock);
                    }
                    block_on(source.writes.excluded.wait(key.sector()));
                }
            }
        }
    }

    /// Looks a block up, and pins its entry if another thread reads or writes it. Inserts a block
    /// that is not cached, and begins to read it.
    ///
    /// Each thread that misses takes a frame before the lock. Only one of them inserts the block.
    pub(crate) fn enter(
        &self,
        source: &Arc<Source>,
        key: Key,
        want: BlockRequest,
    ) -> Result<EnterResult, GetError> {
        hazard::reserve()?;
        self.note_want(source);
        let mut spare = None;
        let blocks = want.wait != Wait::None;
        let mut wait = BufferWait::new(if blocks { self.patience } else { Duration::ZERO });
        let mut rounds = 0_u32;
        loop {
            let found = self.table.find(key);
            if let Some(buffer) = found.and_then(|_| self.hit(key)) {
                return Ok(EnterResult::Cached(buffer));
            }
            source.check_read(key)?;
            let is_absent =
                |found: Option<&Entry>| check!("enter: the block is absent", found.is_none());
            if spare.is_none() && is_absent(found) {
                if !blocks && !self.may_load(source) {
                    return Err(GetError::NoFreeBuffers);
                }
                spare = self.spare(wait.search);
                if spare.is_none() {
                    // Looks again, because the block may be cached after the wait.
                    self.wait_for_buffers(Some(source), &mut wait)?;
                    continue;
                }
            }
            let home = self.table.lock(key);
            let found = home.find();
            if spare.is_some() && is_absent(found) {
                if source.writes.excluded.has(key.sector()) {
                    drop(home); // before the spare frame: that is another lock
                    return Ok(EnterResult::Excluded);
                }
                let Some(spare) = spare.take() else { continue };
                let mut word = self.loading(spare.frame, key);
                let is_read = want.fill == Fill::Read;
                if is_read {
                    step!("enter: pin it for the requester", word = word.pinned_once_more());
                } else {
                    // Before the insertion: a thread that waits for loads only must not wait here.
                    word = word.with(WRITE);
                }
                let Some(place) = home.insert(word) else {
                    // The table has twice as many entries as buffers, but entries that are being
                    // evicted are not free yet.
                    drop(home); // before the spare frame: that is another lock
                    continue;
                };
                let frame = spare.into_frame();
                self.frames.header(frame).set_place(place);
                drop(home);
                self.counters.miss_locked.add(1);
                if !is_read {
                    return self.create(source, key, frame).map(EnterResult::Locked);
                }
                let pinned = Pinned::new(self, self.table.entry(place));
                self.begin(source, key, frame, blocks);
                pinned.into_pin();
                return Ok(EnterResult::Pinned(place));
            }
            let Some(entry) = found else { continue };
            let word = entry.word();
            let is_marked = word.has(IO | WRITE);
            // This thread has a write guard, or is a verifier or device that gets its own block. A
            // task does not block the thread.
            if is_marked && blocks && hazard::protected_by_me(entry) > 0 {
                return Err(GetError::WouldDeadlock);
            }
            if is_marked && word.pins() == MOST_PINS {
                return Err(GetError::TooManyPins);
            }
            if is_marked && entry.try_pin(word).is_ok() {
                drop(home);
                drop(spare); // other threads may need the frame meanwhile
                self.counters.get_locked_waited.add(1);
                return Ok(EnterResult::Pinned(self.frames.header(word.frame()).place()));
            }
            drop(home);
            // Another thread evicts the entry, or has changed it.
            self.wait_a_moment(&mut rounds);
        }
    }

    /// Waits a moment for another thread to finish its change of an entry.
    pub(super) fn wait_a_moment(&self, rounds: &mut u32) {
        *rounds = rounds.saturating_add(1);
        if *rounds < 16 {
            return hint::spin_loop();
        }
        #[cfg(not(offlock_model))]
        if *rounds > 64 {
            // It is a load, which takes as long as the device does.
            return thread::sleep(super::evict::PAUSE);
        }
        thread::yield_now();
    }

    /// Takes a frame, if that needs no wait.
    pub(super) fn spare(&self, search: Search) -> Option<Spare<'_>> {
        let frame = self.try_take_frame(search)?;
        self.counters.create.add(1);
        Some(Spare { cache: self, frame })
    }

    /// Inserts a block as being loaded, if it is not cached and that needs no wait for a buffer.
    /// `flags` are `WRITE` if the caller creates the block: a getter then waits for a writer, with the
    /// cache's patience, and not for a load.
    pub(super) fn insert_load(&self, source: &Source, key: Key, flags: u64) -> Option<Frame> {
        self.note_want(source);
        let spare = self.spare(Search::Short)?;
        let home = self.table.lock(key);
        let word = self.loading(spare.frame, key).with(flags);
        let is_free = home.find().is_none() && !source.writes.excluded.has(key.sector());
        let place = if is_free { home.insert(word) } else { None };
        if let Some(place) = place {
            self.frames.header(spare.frame).set_place(place);
        }
        drop(home); // before a spare frame goes back, which is another lock
        place?;
        self.counters.get.add(1);
        self.counters.miss_locked.add(1);
        Some(spare.into_frame())
    }

    /// Locks an entry that was just inserted, for the caller to fill. The bytes are those of an
    /// earlier block.
    pub(super) fn create(
        &self,
        source: &Source,
        key: Key,
        frame: Frame,
    ) -> Result<Protected, GetError> {
        let entry = self.entry(frame);
        let slot = match hazard::protect_kept(entry) {
            Ok(slot) => slot,
            Err(_) => return Err(self.fail(source, key, frame, Failure::NoMemory, 0)),
        };
        self.admit(frame, key);
        self.frames.writing(frame);
        // Before the block becomes readable: one that is refused here was never cached.
        entry.change(WRITE, 0);
        // Ordering: SeqCst fence, against the fence in `Shared::close`: this thread finds the stage
        // `Closing`, or the closer finds `WRITE` and waits.
        fence(Ordering::SeqCst);
        if source.writes.refuses_writers() {
            slot.clear();
            return Err(self.fail(source, key, frame, Failure::Closed, 0));
        }
        entry.publish_locked();
        Ok(Protected { slot, frame })
    }

    /// Removes the entry of a failed load, and wakes its waiters. The calling thread has `own` pins
    /// beside that of the load.
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
        if others || before.has(WAITED) {
            step!("fail: wake those who wait", self.wake_waiters(frame));
        }
        self.unpin(entry);
        failure.of(source.block(key))
    }

    /// Sleeps until the load or write of an entry ends, which this thread has pinned. Returns the
    /// buffer. With [`Wait::Load`] it fails with [`GetError::WouldBlock`] if a writer has the
    /// block.
    fn wait_for_load(
        &self,
        source: &Source,
        key: Key,
        entry: &Entry,
        wait: Wait,
    ) -> Result<Protected, GetError> {
        let _pinned = Pinned::new(self, entry);
        let frame = entry.word().frame();
        if entry.word().has(IO | WRITE) {
            self.sleep_for_load(entry, wait)?;
        }
        if entry.word().has(FAILED) {
            let failure = Failure::from_code(self.frames.header(frame).failure());
            return Err(failure.of(source.block(key)));
        }
        // The pin keeps the entry until the slot is visible: `unpin` orders the two.
        let slot = hazard::protect_kept(entry).map_err(GetError::from);
        self.frames.reading(frame);
        slot.map(|slot| Protected { slot, frame })
    }

    /// Returns an error if this thread must not block for the load of a frame, because it is in an
    /// engine and may wait for this thread; see [`engine`](crate::engine).
    pub(super) fn check_wait_for_load(&self, frame: Frame) -> Result<(), GetError> {
        let refused = refuses_wait(|| self.frames.header(frame).is_in_engine());
        let may_wait = check!("wait: the load is in no engine", !refused);
        if may_wait { Ok(()) } else { Err(GetError::WouldDeadlock) }
    }

    /// Sleeps until an entry is neither loaded nor written.
    fn sleep_for_load(&self, entry: &Entry, wait: Wait) -> Result<(), GetError> {
        let header = self.frames.header(entry.word().frame());
        let mut since = None;
        if header.is_claimed_by_me() {
            // This thread may have the load. Then no other thread ends it.
            let mut rounds = 16;
            while entry.word().has(IO) {
                self.pause(&mut rounds, &mut since).map_err(|_| GetError::WouldDeadlock)?;
            }
        }
        loop {
            let seen = header.loaded.load();
            let word = entry.word();
            if !word.has(IO | WRITE) {
                return Ok(());
            }
            if word.has(IO) {
                self.check_wait_for_load(word.frame())?;
            }
            if word.has(WRITE) && wait == Wait::Load {
                return Err(GetError::WouldBlock);
            }
            if word.has(WRITE) {
                // The writer may wait for a guard of this thread, so the wait is bounded.
                let left = self.time_left(&mut since)?;
                header.sleep(seen, left);
                continue;
            }
            // The threads of the pool may all wait for this thread.
            if let Some(load) = self.pool.take_queued(entry.key().device(), word.frame()) {
                load.read_here(1);
                continue;
            }
            header.loaded.wait(seen);
        }
    }

    /// Converts the protection by a slot into a pin. Returns the number of the entry.
    pub(crate) fn pin_protected(
        &self,
        Protected { slot, frame }: Protected,
    ) -> Result<Place, GetError> {
        let pinned = self.entry(frame).pin();
        let place = self.frames.header(frame).place();
        slot.clear();
        pinned?;
        Ok(place)
    }

    /// Unpins the entry at `place`.
    pub(crate) fn unpin_place(&self, place: Place) {
        self.unpin(self.table.entry(place));
    }

    /// Unpins an entry. The last pin of a failed load gives the frame back.
    pub(crate) fn unpin(&self, entry: &Entry) {
        let left = entry.unpin();
        if check!("unpin: it was the last pin", left.pins() == 0) && left.has(FAILED) {
            let frame = left.frame();
            self.table.free(self.frames.header(frame).place());
            self.give(frame);
        } else if left.pins() == 0 && left.has(WAITED) && !left.has(WRITE | BACK) {
            // Without pins and marks the block can be locked, so no waiter needs the flag. If the
            // entry is another block's by now, the drop of that block's last pin wakes its waiters.
            let _ = entry.try_change(left, 0, WAITED);
            let frame = left.frame();
            step!("unpin: wake the tasks that wait to write", self.waiters.wake(frame));
        }
    }
}
