//! Misses: blocks that are not cached, or are being read.
//!
//! ```text
//!  get, get_async, readahead ──► enter: a frame, lock the home, look again, insert, pin it again
//!      │                                 └──► begin: the device begins to read
//!      │ wait_for_load                                  │ later, in any thread
//!      ▼                                                ▼
//!  the entry is no longer loading ◄── wake ─── Load::finish, or its drop: publish, or fail
//! ```
//!
//! The first pin of the entry belongs to the load, each other to a requester that waits. A load
//! publishes the bytes, or hides the entry and stores the reason. The last pin of a failed load gives
//! the frame back. A thread that blocks may read the device itself: then the load ends before the thread
//! begins to wait.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use std::{fmt, io};

use offlock_sync::atomic::{Ordering, fence};
use offlock_sync::{Arc, check, step, thread_id};

use super::evict::{BufferWait, Search};
use super::pool::{Job, Lane};
use super::{Protected, Shared};
use crate::device::retry_interrupted;
#[cfg(feature = "aio-reap")]
use crate::engine::InEngine;
use crate::engine::refuses_wait;
use crate::error::{Failure, GetError};
use crate::frames::{Frame, IN_ENGINE};
use crate::hazard::{self, Slot};
use crate::source::{Operation, Source};
use crate::wait::{block_on, contain, is_blocking};
use crate::word::{BACK, Entry, EntryWord, FAILED, IO, Key, MOST_PINS, STALE, WAITED, WRITE};

/// A read of a block: an offset on the device, and the buffer, which belongs to the load alone.
///
/// The device that [begins](crate::BlockDevice::begin_read) the read owns it and ends it once, in
/// any thread: by [`finish`](Self::finish), or by a drop, which fails it with `ECANCELED`. The
/// threads and tasks that need the block wait for that; if the load is forgotten, they wait for
/// ever.
#[must_use = "a drop fails the read with `ECANCELED`: end it with `finish`"]
pub struct Load {
    source: Operation<Arc<Source>>,
    key: Key,
    frame: Frame,
    /// The thread that began the load and waits for it; 0 for a task, readahead or a claim.
    requester: u64,
    /// The failure that the drop reports; `None` once the load has ended.
    failure: Option<Failure>,
}

impl Load {
    /// Returns a load of an inserted entry. `None` if the device is closed.
    pub(super) fn new(source: &Arc<Source>, key: Key, frame: Frame, blocks: bool) -> Option<Self> {
        let requester = if blocks { thread_id() } else { 0 };
        let source = Operation::begin(Arc::clone(source))?;
        let failure = Some(Failure(libc::ECANCELED));
        Some(Self { source, key, frame, requester, failure })
    }

    /// Returns the number of the device.
    pub(super) fn device(&self) -> u16 {
        self.source.id
    }

    /// Returns the offset on the device in bytes.
    pub fn offset(&self) -> u64 {
        Source::offset(self.key)
    }

    /// Returns whether the calling thread blocks until this load ends, so that another thread would
    /// not make it faster. False on a thread that the load was sent to.
    pub fn is_blocking(&self) -> bool {
        self.requester == thread_id()
    }

    /// Calls the blocking [`read`](crate::BlockDevice::read) of the device, and ends the load: at
    /// once on a thread that [blocks](Self::is_blocking) for it, otherwise later on a thread of the
    /// cache.
    ///
    /// Allocates if no capacity is left from earlier loads.
    pub fn defer(self) {
        if self.is_blocking() {
            return self.read_here(1);
        }
        self.source.cache.frames.header(self.frame).set_loader(0);
        let (cache, frame) = (Arc::clone(&self.source.cache), self.frame);
        match cache.write_back.pool.queue(self.device(), Lane::Load, Job::Load(self)) {
            Ok(true) => step!("defer: wake those who may read it", cache.waiting.wake(frame)),
            Err(Job::Load(load)) => load.read_here(0), // no thread can be started
            _ => {}
        }
    }

    /// Ends the load with the number of bytes read, less than all only at the end of the device, or
    /// with an error. Wakes the waiting threads and tasks, which also get a panic of the verifier
    /// as an error. `Interrupted` is an error like any other: a device that wants to retry does so
    /// first.
    pub fn finish(self, result: io::Result<usize>) {
        self.end(result, 0);
    }

    /// Ends the load. `own` of the other pins belong to the calling thread, which needs no wake-up.
    fn end(mut self, result: io::Result<usize>, own: u64) {
        self.failure = None;
        let (source, cache, frame) = (&*self.source, &self.source.cache, self.frame);
        let mut bytes = cache.frames.bytes(frame);
        // SAFETY: invariant 1 of `frames`: the frame is the load's, which lives as long as this
        // borrow.
        let bytes = unsafe { bytes.as_mut() };
        let slot = source.writes.options.verify.is_some().then(|| self.protect());
        let accepted = contain(|| source.accept(self.key, bytes, result));
        slot.flatten().inspect(|slot| slot.clear());
        match accepted.unwrap_or(Err(Failure::PANICKED)) {
            Ok(()) => cache.publish(frame, own),
            Err(failure) => _ = cache.fail(source, self.key, frame, failure, own),
        }
    }

    /// Sets a slot for the buffer, which this thread reads, so that a get of the block by its device or
    /// verifier returns [`GetError::WouldDeadlock`].
    fn protect(&self) -> Option<&'static Slot> {
        hazard::protect_kept(self.source.cache.entry(self.frame)).ok()
    }

    /// Reads the block on this thread, to which `own` of the other pins belong. Each waiter gets a
    /// panic of the device as an error.
    pub(super) fn read_here(mut self, own: u64) {
        let slot = self.protect();
        let mut bytes = self.source.cache.frames.bytes(self.frame);
        // SAFETY: invariant 1 of `frames`: the frame is the load's, which lives as long as this
        // borrow.
        let bytes = unsafe { bytes.as_mut() };
        let read = || retry_interrupted(|| self.source.device.read(self.offset(), bytes));
        let read = contain(read);
        slot.inspect(|slot| slot.clear());
        match read {
            Ok(result) => self.end(result, own),
            Err(_) => step!("load: tell of the panic", self.failure = Some(Failure::PANICKED)),
        }
    }

    /// Notes that an engine of this thread reads the block, until the load ends or is deferred. The
    /// operation counts until the returned value drops.
    #[cfg(feature = "aio-reap")]
    pub(crate) fn enter_engine(&self) -> InEngine {
        self.source.cache.frames.header(self.frame).set_loader(IN_ENGINE);
        InEngine::new(None)
    }

    pub(super) fn frame(&self) -> Frame {
        self.frame
    }
}

impl Deref for Load {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: invariant 1 of `frames`: the frame is the load's until the entry is published.
        unsafe { self.source.cache.frames.bytes(self.frame).as_ref() }
    }
}

impl DerefMut for Load {
    fn deref_mut(&mut self) -> &mut [u8] {
        let mut bytes = self.source.cache.frames.bytes(self.frame);
        // SAFETY: as in `deref`.
        unsafe { bytes.as_mut() }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let Some(failure) = self.failure else { return };
        let failure = if std::thread::panicking() { Failure::PANICKED } else { failure };
        self.source.cache.fail(&self.source, self.key, self.frame, failure, 0);
    }
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load")
            .field("offset", &self.offset())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// A frame that this thread owns. Its drop gives the frame back.
pub(super) struct Spare<'c> {
    cache: &'c Shared,
    pub(super) frame: Frame,
}

/// A pin of this thread on a buffer, which it takes over. Its drop unpins, also in a panic.
pub(super) struct Pinned<'c>(pub(super) &'c Shared, pub(super) Frame);

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.0.unpin(self.1);
    }
}

impl Spare<'_> {
    pub(super) fn into_frame(self) -> Frame {
        ManuallyDrop::new(self).frame
    }
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        self.cache.frames.give(self.frame);
    }
}

/// The contents of a block that was not cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// The bytes of the device.
    Read,
    /// Any bytes; the caller overwrites them.
    Caller,
    /// The bytes that a load brings, which the caller begins after `enter`.
    Claim,
}

/// The result of a request for a block.
#[must_use = "it may be pinned"]
pub(crate) enum EnterResult {
    /// The buffer is cached, and a slot of the caller protects it.
    Cached(Protected),
    /// The buffer is pinned for the caller. The block is being read or written, or its load has just
    /// ended.
    Pinned(Frame),
    /// The block was not cached. The caller fills the buffer, as its writer.
    Locked(Protected),
    /// The block was not cached. The caller loads it into the frame.
    Claimed(Frame),
    /// The block is being discarded.
    Excluded,
    /// The search found no buffer, or the device has its share of the loads.
    NoBuffer,
}

impl Shared {
    /// Returns the buffer of a block, read from the device if it is not cached. Blocks the thread.
    #[cold]
    #[inline(never)]
    pub(crate) fn get(&self, source: &Arc<Source>, key: Key) -> Result<Protected, GetError> {
        self.counters.get.add(1);
        let mut wait = BufferWait::new(self.waiting.patience);
        loop {
            match self.enter(source, key, Fill::Read, wait.search, true)? {
                EnterResult::Pinned(frame) => return self.protect_loaded(source, key, frame),
                EnterResult::Cached(buffer) | EnterResult::Locked(buffer) => return Ok(buffer),
                later => block_on(self.wait_to_enter(source, key, later, &mut wait))?,
            }
        }
    }

    /// [Enters](Self::enter) a block, and waits for a buffer, at most for `patience`, and for the end of
    /// a discard. Returns neither `NoBuffer` nor `Excluded`.
    pub(crate) async fn miss(
        &self,
        source: &Arc<Source>,
        key: Key,
        fill: Fill,
        patience: Duration,
    ) -> Result<EnterResult, GetError> {
        let (blocks, mut wait) = (is_blocking().await, BufferWait::new(patience));
        loop {
            // Also after a wait for a buffer, because the block may be cached then.
            match self.enter(source, key, fill, wait.search, blocks)? {
                later @ (EnterResult::Excluded | EnterResult::NoBuffer) => {
                    self.wait_to_enter(source, key, later, &mut wait).await?;
                }
                entered => return Ok(entered),
            }
        }
    }

    /// Waits until a block that is excluded, or for which there is no buffer, may be entered.
    async fn wait_to_enter(
        &self,
        source: &Arc<Source>,
        key: Key,
        later: EnterResult,
        wait: &mut BufferWait,
    ) -> Result<(), GetError> {
        match later {
            EnterResult::NoBuffer => return self.wait_for_buffers(source, wait).await,
            _ if is_blocking().await && !source.may_wait() => return Err(GetError::WouldDeadlock),
            _ => source.writes.excluded.wait(key.sector()).await,
        }
        Ok(())
    }

    /// Looks a block up, and pins its entry if another thread reads or writes it. Inserts a block
    /// that is not cached, and begins to read it. Does not wait, except for the read if the calling
    /// thread `blocks`.
    ///
    /// Each thread that misses takes a frame before the lock. Only one of them inserts the block.
    pub(crate) fn enter(
        &self,
        source: &Arc<Source>,
        key: Key,
        fill: Fill,
        search: Search,
        blocks: bool,
    ) -> Result<EnterResult, GetError> {
        hazard::reserve()?;
        self.write_back.note_want(source);
        let (mut spare, mut rounds) = (None, 0);
        loop {
            let found = self.lookup.find(key);
            if let Some(buffer) = found.and_then(|_| self.hit(key)) {
                return Ok(EnterResult::Cached(buffer));
            }
            source.check_read(key)?;
            let is_absent =
                |found: Option<&Entry>| check!("enter: the block is absent", found.is_none());
            if spare.is_none() && is_absent(found) {
                let may_load = blocks || fill == Fill::Caller || self.write_back.may_load(source);
                spare = if may_load { self.spare(search) } else { None };
                if spare.is_none() {
                    return Ok(EnterResult::NoBuffer);
                }
            }
            let home = self.lookup.lock(key);
            let found = home.find();
            if spare.is_some() && is_absent(found) {
                if source.writes.excluded.has(key.sector()) {
                    drop(home); // before the spare frame: that is another lock
                    return Ok(EnterResult::Excluded);
                }
                let Some(spare) = spare.take() else { continue };
                let mut word = self.frames.loading(spare.frame, key);
                match fill {
                    Fill::Read => {
                        step!("enter: pin it for the requester", word = word.pinned_once_more());
                    }
                    // Before the insertion: a thread that waits for loads only must not wait here.
                    Fill::Caller => word = word.with(WRITE),
                    Fill::Claim => {}
                }
                let Some(place) = home.insert(word) else {
                    // The table has twice as many entries as buffers, but entries that are being
                    // evicted are not free yet.
                    drop(home); // before the spare frame: that is another lock
                    if search == Search::Short {
                        return Ok(EnterResult::NoBuffer); // a claim does not wait for evictors
                    }
                    continue;
                };
                let frame = spare.into_frame();
                self.frames.header(frame).set_place(place);
                drop(home);
                self.counters.miss_locked.add(1);
                return Ok(match fill {
                    Fill::Caller => EnterResult::Locked(self.create(source, key, frame)?),
                    Fill::Claim => EnterResult::Claimed(frame),
                    Fill::Read => {
                        // The load may have ended when `begin_read` returns. A panic drops it, which
                        // fails it and wakes the waiters.
                        if let Some(load) = self.load(source, key, frame, blocks) {
                            let _ = contain(|| source.device.begin_read(load));
                        }
                        EnterResult::Pinned(frame)
                    }
                });
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
                return Ok(EnterResult::Pinned(word.frame()));
            }
            drop(home);
            // Another thread evicts the entry, or has changed it.
            self.waiting.spin(&mut rounds);
        }
    }

    /// Takes a frame, if that needs no wait.
    fn spare(&self, search: Search) -> Option<Spare<'_>> {
        let frame = self.frames.take(&self.lookup, search, self.is_mostly_dirty())?;
        self.counters.create.add(1);
        Some(Spare { cache: self, frame })
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
            Err(_) => return Err(self.fail(source, key, frame, Failure::NO_MEMORY, 0)),
        };
        self.frames.admit(&self.lookup, frame, key);
        self.frames.writing(frame);
        // Before the block becomes readable: one that is refused here was never cached.
        entry.change(WRITE, 0);
        // Ordering: SeqCst fence, against the fence in `Shared::close`: this thread finds the stage
        // `Closing`, or the closer finds `WRITE` and waits.
        fence(Ordering::SeqCst);
        if source.writes.refuses_writers() {
            slot.clear();
            return Err(self.fail(source, key, frame, Failure::CLOSED, 0));
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
        header.set_failure(failure.0);
        self.frames.withdraw(frame);
        let home = self.lookup.lock(key);
        home.hide(header.place());
        let before = entry.change(STALE | FAILED, IO | WRITE | WAITED);
        drop(home);
        let others = before.pins() > 1 + own;
        if others || before.has(WAITED) {
            step!("fail: wake those who wait", self.waiting.wake(frame));
        }
        self.unpin(frame);
        failure.of(source.block(key))
    }

    /// Returns the load of an entry that was just inserted. `None` if the device is closed.
    fn load(&self, source: &Arc<Source>, key: Key, frame: Frame, blocks: bool) -> Option<Load> {
        let Some(load) = Load::new(source, key, frame, blocks) else {
            self.fail(source, key, frame, Failure::CLOSED, 0);
            return None;
        };
        self.frames.admit(&self.lookup, frame, key);
        self.frames.writing(frame);
        self.counters.get_read.add(1);
        source.writes.note_load(&source.sectors(key));
        Some(load)
    }

    /// Makes a loaded buffer readable, and wakes the waiters. `own` of the pins belong to the
    /// calling thread, and one to each waiter.
    fn publish(&self, frame: Frame, own: u64) {
        self.frames.writing(frame); // the load has written until now
        if self.entry(frame).publish().pins() > own {
            step!("load: wake those who wait", self.waiting.wake(frame));
        }
    }

    /// Waits until the load or write of a buffer ends that the caller has pinned. The patience of the
    /// cache limits the wait for a writer, which may wait for a guard of the caller.
    pub(crate) async fn wait_for_load(
        &self,
        source: &Source,
        key: Key,
        frame: Frame,
    ) -> Result<(), GetError> {
        let entry = self.entry(frame);
        let blocks = is_blocking().await;
        if blocks && self.frames.header(frame).loader() == thread_id() {
            // This thread may have the load. Then no other thread ends it.
            let (mut rounds, mut since) = (16, None);
            while entry.word().has(IO) {
                let paused = self.waiting.pause(&mut rounds, &mut since).await;
                paused.map_err(|_| GetError::WouldDeadlock)?;
            }
        }
        let look = || {
            let word = entry.word();
            // A block in creation has both flags. The end of its `IO` wakes no waiter before the guard drops.
            if !word.has(IO) || word.has(WRITE) {
                return Some(Ok(None));
            }
            if !blocks {
                return None;
            }
            // The threads of the pool may all wait for this thread, which reads the block then.
            let queued = || self.write_back.pool.take_queued(key.device(), frame);
            let refused = self.check_wait_for_load(frame).err();
            refused.map(Err).or_else(|| Some(Ok(Some(queued()?))))
        };
        while let Some(load) =
            self.waiting.wait(frame.0.into(), None, look).await.transpose()?.flatten()
        {
            Load::read_here(load, 1);
        }
        if entry.word().has(WRITE) {
            let end = self.waiting.end(&mut None)?;
            let look = || (!entry.word().has(IO | WRITE)).then_some(());
            self.waiting.wait(frame.0.into(), end, look).await.ok_or(GetError::Busy)?;
        }
        self.check_load(source, key, entry.word())
    }

    /// Returns the error of a load that has failed, whose buffer, with that word, the caller has pinned.
    fn check_load(&self, source: &Source, key: Key, word: EntryWord) -> Result<(), GetError> {
        let failure = || Failure(self.frames.header(word.frame()).failure());
        if word.has(FAILED) { Err(failure().of(source.block(key))) } else { Ok(()) }
    }

    /// Waits, as a thread, for the end of a load or write of a buffer that the thread has pinned, and
    /// protects the buffer.
    pub(super) fn protect_loaded(
        &self,
        source: &Source,
        key: Key,
        frame: Frame,
    ) -> Result<Protected, GetError> {
        let (entry, _pinned) = (self.entry(frame), Pinned(self, frame));
        let word = entry.word();
        if word.has(IO | WRITE) {
            block_on(self.wait_for_load(source, key, frame))?;
        } else {
            self.check_load(source, key, word)?;
        }
        // The pin keeps the entry until the slot is visible: `unpin` orders the two.
        let slot = hazard::protect_kept(entry)?;
        self.frames.reading(frame);
        Ok(Protected { slot, frame })
    }

    /// Returns an error if this thread must not block for the load of a frame, because it is in an
    /// engine and may wait for this thread; see [`engine`](crate::engine).
    pub(super) fn check_wait_for_load(&self, frame: Frame) -> Result<(), GetError> {
        let refused = refuses_wait(|| self.frames.header(frame).loader() == IN_ENGINE);
        let may_wait = check!("wait: the load is in no engine", !refused);
        if may_wait { Ok(()) } else { Err(GetError::WouldDeadlock) }
    }

    /// Returns whether the load or write of a buffer has ended. The caller has pinned the buffer.
    pub(crate) fn has_ended(&self, frame: Frame) -> bool {
        !self.entry(frame).word().has(IO | WRITE)
    }

    /// Converts the protection by a slot into a pin.
    pub(crate) fn pin_protected(&self, buffer: &Protected) -> Result<(), GetError> {
        let pinned = self.entry(buffer.frame).pin();
        buffer.slot.clear();
        pinned
    }

    /// Unpins a buffer. The last pin of a failed load gives the frame back.
    pub(crate) fn unpin(&self, frame: Frame) {
        let entry = self.entry(frame);
        let left = entry.unpin();
        if check!("unpin: it was the last pin", left.pins() == 0) && left.has(FAILED) {
            self.lookup.free(self.frames.header(frame).place());
            self.frames.give(frame);
        } else if left.pins() == 0 && left.has(WAITED) && !left.has(WRITE | BACK) {
            // Without pins and marks the block can be locked, so no waiter needs the flag. If the
            // entry is another block's by now, the drop of that block's last pin wakes its waiters.
            let _ = entry.try_change(left, 0, WAITED);
            step!("unpin: wake the tasks that wait to write", self.waiting.wake(frame));
        }
    }

    /// Begins a load of a block that is not cached, unless that has to wait.
    pub(crate) fn claim(&self, source: &Arc<Source>, key: Key) -> Result<Option<Load>, GetError> {
        source.check_read(key)?;
        if self.lookup.is_cached(key) {
            return Ok(None);
        }
        self.write_back.note_want(source);
        if !self.write_back.may_load(source) || !self.frames.is_worth_a_buffer(&self.lookup, key) {
            return Ok(None);
        }
        let entered = self.enter(source, key, Fill::Claim, Search::Short, false)?;
        let EnterResult::Claimed(frame) = entered else {
            match entered {
                EnterResult::Pinned(frame) => self.unpin(frame),
                EnterResult::Cached(buffer) => buffer.slot.clear(),
                _ => {}
            }
            return Ok(None);
        };
        self.counters.get.add(1);
        let load = self.load(source, key, frame, false).ok_or(GetError::Closed)?;
        self.frames.header(frame).set_loader(thread_id());
        Ok(Some(load))
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use crate::frames::Frame;
    use crate::word::{EntryWord, Key};
    use crate::{Cache, GetError, MemoryDevice};

    /// The evictors have all entries that hold no block.
    #[test]
    fn inv07_a_call_that_must_not_wait_waits_for_no_entry() {
        let cache = Cache::builder(8 * 512).block_size(512).build().unwrap();
        let disk = cache.attach(MemoryDevice::new(vec![0; 8 * 512])).unwrap();
        let lookup = &disk.shared.lookup;
        for sector in 0..u64::from(lookup.places()) {
            let home = lookup.lock(Key::new(disk.source.id + 1, sector));
            home.insert(EntryWord::loading(Frame(0))).unwrap();
        }
        assert!(disk.claim(3).unwrap().is_none());
        assert_eq!(disk.try_create(3).err(), Some(GetError::WouldBlock));
    }
}
