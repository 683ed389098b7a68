//! Loads: blocks that are being read.
//!
//! ```text
//!  get, get_async, readahead ──► insert the entry, pin it again ──► the device begins to read
//!      │ waits for the entry, or is gone                                │ later, in any thread
//!      ▼                                                                ▼
//!  the entry is no longer loading ◄── wake ─────────────────── Load::finish, or its drop
//! ```
//!
//! The first pin of the entry belongs to the load, each other to a requester that waits. A
//! requester that blocks may read the device itself: then the load ends before the requester begins
//! to wait.
//!
//! A task waits at the frame of the entry. It has a pin while it waits, or has set `WAITED`, so the
//! end of a load or of a write looks for waiting tasks only if one of the two is there.

use std::future::poll_fn;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::pin::pin;
use std::task::Poll;
use std::time::Instant;
use std::{fmt, io, ptr};

use offlock_sync::{Arc, WaitSet, Waiter, step, thread_id};

use super::Shared;
#[cfg(feature = "aio-reap")]
use crate::engine::InEngine;
use crate::error::{Failure, GetError};
use crate::frames::{Frame, Place};
use crate::hazard::{self, Slot};
use crate::source::{Operation, Source};
use crate::wait::{contain, wake_all};
use crate::word::{DIRTY, FAILED, IO, Key, MOST_PINS, WRITE};

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
}

impl Load {
    /// Returns a load of an inserted entry. `None` if the device is closed.
    pub(super) fn new(source: &Arc<Source>, key: Key, frame: Frame, blocks: bool) -> Option<Self> {
        let requester = if blocks { thread_id() } else { 0 };
        Some(Self { source: Operation::begin(Arc::clone(source))?, key, frame, requester })
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
        self.source.cache.frames.header(self.frame).set_not_in_engine();
        let (cache, frame) = (Arc::clone(&self.source.cache), self.frame);
        match cache.pool.queue_load(self) {
            Ok(false) => {}
            Ok(true) => step!("defer: wake those who may read it", cache.wake_threads(frame)),
            // No thread can be started.
            Err(load) => load.read_here(0),
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
    fn end(self, result: io::Result<usize>, own: u64) {
        let (source, key, frame) = self.into_parts();
        let mut bytes = source.cache.frames.bytes(frame);
        // SAFETY: invariant 1 of `frames`: the frame was the load's, and so is this function's.
        let bytes = unsafe { bytes.as_mut() };
        let slot = source.writes.options.verify.is_some().then(|| source.cache.protect_own(frame));
        let accepted = contain(|| source.accept(key, bytes, result));
        slot.flatten().inspect(|slot| slot.clear());
        match accepted.unwrap_or(Err(Failure::Panicked)) {
            Ok(()) => source.cache.publish(frame, own),
            Err(failure) => _ = source.cache.fail(&source, key, frame, failure, own),
        }
    }

    /// Reads the block on this thread, to which `own` of the other pins belong. Each waiter gets a
    /// panic of the device as an error.
    pub(super) fn read_here(self, own: u64) {
        let slot = self.source.cache.protect_own(self.frame);
        let mut bytes = self.source.cache.frames.bytes(self.frame);
        // SAFETY: invariant 1 of `frames`: the frame is the load's, which lives as long as this
        // borrow.
        let bytes = unsafe { bytes.as_mut() };
        let read = contain(|| {
            loop {
                match self.source.device.read(self.offset(), bytes) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    result => break result,
                }
            }
        });
        slot.inspect(|slot| slot.clear());
        match read {
            Ok(result) => self.end(result, own),
            Err(_) => step!("load: tell of the panic", self.give_up(Failure::Panicked)),
        }
    }

    /// Notes that an engine of this thread reads the block, until the load ends or is deferred. The
    /// operation counts until the returned value drops.
    #[cfg(feature = "aio-reap")]
    pub(crate) fn enter_engine(&self) -> InEngine {
        self.source.cache.frames.header(self.frame).set_in_engine();
        InEngine::new(None)
    }

    /// For the models: as a device does that reads by an engine of this thread.
    #[cfg(offlock_model)]
    #[doc(hidden)]
    pub fn enter_engine_of_model(&self) -> impl Drop + use<> {
        self.enter_engine()
    }

    pub(super) fn frame(&self) -> Frame {
        self.frame
    }

    fn give_up(self, failure: Failure) {
        let (source, key, frame) = self.into_parts();
        source.cache.fail(&source, key, frame, failure, 0);
    }

    /// Takes the load apart, for a caller that ends it.
    fn into_parts(self) -> (Operation<Arc<Source>>, Key, Frame) {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used for its source any more.
        let source = unsafe { ptr::read(&raw const this.source) };
        (source, this.key, this.frame)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let mut bytes = self.source.cache.frames.bytes(self.frame);
        // SAFETY: invariant 1 of `frames`: the frame is the load's until the entry is published.
        unsafe { bytes.as_mut() }
    }
}

impl Deref for Load {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`.
        unsafe { self.source.cache.frames.bytes(self.frame).as_ref() }
    }
}

impl DerefMut for Load {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let failure = if std::thread::panicking() {
            Failure::Panicked
        } else {
            Failure::Errno(libc::ECANCELED)
        };
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

/// The number of sets of waiting tasks. A guess: tasks that wait at the same time rarely need the
/// same lock.
const SETS: usize = if cfg!(offlock_model) { 2 } else { 64 };

/// The tasks that wait for loads, writes, write-backs and pins, by frame.
#[derive(Debug)]
pub(super) struct Waiters(Box<[WaitSet]>);

impl Waiters {
    pub(super) fn new() -> Self {
        Self((0..SETS).map(|_| WaitSet::new()).collect())
    }

    /// Returns a wait at a frame, which begins when it is polled.
    fn wait(&self, frame: Frame) -> Waiter<'_> {
        self.set(frame).waiter_for(frame.0.into())
    }

    /// Wakes the tasks that wait at a frame. The caller holds no lock.
    pub(super) fn wake(&self, frame: Frame) {
        wake_all(self.set(frame).take(Some(frame.0.into())));
    }

    fn set(&self, frame: Frame) -> &WaitSet {
        &self.0[frame.0 as usize % SETS]
    }
}

impl Shared {
    /// Sets a slot for a buffer that this thread reads, so that a get of the block by its device or
    /// verifier returns [`GetError::WouldDeadlock`].
    fn protect_own(&self, frame: Frame) -> Option<&'static Slot> {
        hazard::protect_kept(self.entry(frame)).ok()
    }

    /// Begins the load of an entry that was just inserted. It may have ended when this returns.
    pub(super) fn begin(&self, source: &Arc<Source>, key: Key, frame: Frame, blocks: bool) {
        let Some(load) = Load::new(source, key, frame, blocks) else {
            self.fail(source, key, frame, Failure::Closed, 0);
            return;
        };
        self.admit(frame, key);
        self.frames.writing(frame);
        self.counters.get_read.add(1);
        source.note_load(key);
        // A panic drops the load, which fails it and wakes the waiters.
        let _ = contain(|| source.device.begin_read(load));
    }

    /// Makes a loaded buffer readable, and wakes the waiters. `own` of the pins belong to the
    /// calling thread, and one to each waiter.
    fn publish(&self, frame: Frame, own: u64) {
        self.frames.writing(frame); // the load has written until now
        if self.entry(frame).publish().pins() > own {
            step!("load: wake those who wait", self.wake_waiters(frame));
        }
    }

    /// Wakes the threads and tasks that wait for a frame. Its entry has changed before.
    pub(super) fn wake_waiters(&self, frame: Frame) {
        self.wake_threads(frame);
        step!("load: wake the tasks", self.waiters.wake(frame));
    }

    /// Wakes the threads that sleep for a frame, which then look at the entry again.
    fn wake_threads(&self, frame: Frame) {
        let header = self.frames.header(frame);
        header.loaded.advance();
        header.loaded.wake_all();
    }

    /// Waits, as a task, until the load of an entry that the caller has pinned ends. Returns at once if a
    /// thread creates the block: that wakes no task before the guard drops.
    pub(crate) async fn wait_while_read(&self, place: Place) {
        let entry = self.table.entry(place);
        let look = || {
            let word = entry.word();
            (!word.has(IO) || word.has(WRITE)).then_some(())
        };
        self.wait_as_task(entry.word().frame(), None, look).await;
    }

    /// Waits, as a task, until `look` returns a value. Looks again whenever the waiters at a frame are
    /// woken. Returns `None` at the time `end`.
    pub(super) async fn wait_as_task<T>(
        &self,
        frame: Frame,
        end: Option<Instant>,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let mut waiter = pin!(self.waiters.wait(frame));
        let mut alarm = self.timer.alarm();
        poll_fn(|context| {
            if let Poll::Ready(value) = waiter.as_mut().poll(context, &mut look) {
                return Poll::Ready(Some(value));
            }
            let Some(end) = end else { return Poll::Pending };
            if Instant::now() >= end {
                return Poll::Ready(None);
            }
            alarm.set(end, context.waker());
            Poll::Pending
        })
        .await
    }

    /// Returns why a load failed, whose entry the caller has pinned. `None` if it succeeded.
    pub(crate) fn failure(&self, place: Place) -> Option<Failure> {
        let word = self.table.entry(place).word();
        let header = self.frames.header(word.frame());
        word.has(FAILED).then(|| Failure::from_code(header.failure()))
    }

    /// Returns whether the load or write of an entry has ended. The caller has pinned the entry.
    pub(crate) fn has_ended(&self, place: Place) -> bool {
        !self.table.entry(place).word().has(IO | WRITE)
    }

    /// Returns the frame of an entry that the caller has pinned.
    pub(crate) fn frame_at(&self, place: Place) -> Frame {
        self.table.entry(place).word().frame()
    }
}

// Loads that the caller fills.

/// The result of one attempt to invalidate a block.
pub(crate) enum InvalidateResult {
    /// The block is not cached any more, or is dirty.
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
        let Some(frame) = self.insert_load(source, key, 0) else { return Ok(None) };
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

    /// Invalidates a block for a task, unless it is dirty or that has to wait.
    pub(crate) fn invalidate_or_pin(
        &self,
        source: &Arc<Source>,
        key: Key,
    ) -> Result<InvalidateResult, GetError> {
        if self.try_invalidate(Some(source), key, DIRTY, false)?.is_some() {
            return Ok(InvalidateResult::NotCached);
        }
        let home = self.table.lock(key);
        let Some(entry) = home.find() else { return Ok(InvalidateResult::Busy) };
        let word = entry.word();
        if !word.has(IO | WRITE) || word.pins() == MOST_PINS || entry.try_pin(word).is_err() {
            return Ok(InvalidateResult::Busy);
        }
        drop(home);
        Ok(InvalidateResult::Pinned(self.frames.header(word.frame()).place()))
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
