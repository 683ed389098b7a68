//! A load that goes on while its requester does something else, and who waits for it.
//!
//! ```text
//!  get, get_async, readahead ──► insert the entry, and pin it once more ──► the device begins to read
//!      │ waits for the entry, or is gone                                        │ later, in any thread
//!      ▼                                                                        ▼
//!  the entry is no longer loading ◄── wake ────────────────────────── Load::finish, or its drop
//! ```
//!
//! The entry's first pin is the load's, as in `miss`; every other belongs to somebody who waits.
//!
//! # No wake-up is lost
//!
//! Who waits puts its waker on the list, under the lock, and then looks at the word. Who ends a load
//! changes the word, and then takes the wakers off the list, under the lock. Whichever of the two has
//! the lock first, the other sees what it did. Those that are still on the list once a load is over, or
//! whose task is gone, are taken off it as well: a waker may keep a whole task.

use std::fmt;
use std::io;
use std::mem::{self, ManuallyDrop};
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::{Arc, WordLock, mutant};

use super::evict::BufferWait;
use super::miss::Pinned;
use super::{Reuse, Shared, linger};
use crate::contain::contain;
use crate::error::{Failure, GetError};
use crate::frames::Frame;
use crate::hazard::{self, Slot};
use crate::in_flight::Operation;
use crate::source::Source;
use crate::table::Place;
use crate::word::{FAILED, IO, Key, MOST_PINS, WRITE, Word};

/// A block that is to be read: its place on the device, and the buffer, which is the load's alone.
///
/// Dropping it without [`finish`](Self::finish) fails it, with `ECANCELED`; a forgotten one lets those
/// who want the block wait for ever.
#[must_use = "the block counts as being read until this ends"]
pub struct Load {
    source: Operation<Arc<Source>>,
    key: Key,
    frame: Frame,
}

impl Load {
    /// `None` if the device was closed.
    pub(super) fn new(source: &Arc<Source>, key: Key, frame: Frame) -> Option<Self> {
        Some(Self { source: Operation::begin(Arc::clone(source))?, key, frame })
    }

    /// Where the block begins on the device, in bytes.
    pub fn offset(&self) -> u64 {
        Source::offset(self.key)
    }

    /// Ends the load: with how much was read, less than all only at the end of the device, or with what
    /// the device says. Wakes who waits for it. Where the verifier panics, that is told to them.
    pub fn finish(self, result: io::Result<usize>) {
        let (source, key, frame) = self.into_parts();
        let mut bytes = source.cache.frames.bytes(frame);
        // SAFETY: invariant 1 of `frames`: the frame was the load's, and so is this function's.
        let bytes = unsafe { bytes.as_mut() };
        let own = source.writes.options.verify.is_some().then(|| source.cache.name_own(frame));
        let accept = || source.accept(key, bytes, result);
        let accepted = match mutant("finish-unwinds") {
            true => Ok(accept()),
            false => contain(accept),
        };
        own.flatten().inspect(|slot| slot.clear());
        match accepted.unwrap_or(Err(Failure::Panicked)) {
            Ok(()) => source.cache.publish(frame),
            Err(failure) => _ = source.cache.fail(&source, key, frame, failure),
        }
    }

    /// Reads the block here and now. A panic of the device's is told to those who wait.
    pub(crate) fn read(mut self) {
        let source = Arc::clone(&self.source);
        let key = self.key;
        let own = source.cache.name_own(self.frame);
        let read = contain(|| {
            loop {
                match source.device.read(Source::offset(key), &mut self) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    result => break result,
                }
            }
        });
        own.inspect(|slot| slot.clear());
        match read {
            Ok(result) => self.finish(result),
            Err(_) if mutant("read-leaves-what-panicked") => mem::forget(self),
            Err(_) => self.give_up(Failure::Panicked),
        }
    }

    pub(super) fn give_up(self, failure: Failure) {
        let (source, key, frame) = self.into_parts();
        source.cache.fail(&source, key, frame, failure);
    }

    /// What it has, which somebody else ends.
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
        let failure = Failure::Errno(libc::ECANCELED);
        self.source.cache.fail(&self.source, self.key, self.frame, failure);
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

/// Lists of wakers. A guess: with thousands of loads at a time each is short.
const LISTS: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 64 };

/// Who waits for loads without a thread that sleeps: a list for the frames of a number modulo
/// [`LISTS`].
#[derive(Debug)]
pub(super) struct AllWakers(Box<[Wakers]>);

impl AllWakers {
    pub(super) fn new() -> Self {
        Self((0..LISTS).map(|_| Wakers::new()).collect())
    }

    fn of(&self, frame: Frame) -> &Wakers {
        // The upper bits as well: the frames of large blocks begin at every 128th unit.
        let unit = frame.unit() as usize;
        &self.0[(unit ^ unit >> 6) % LISTS]
    }
}

#[derive(Debug)]
#[repr(align(64))]
struct Wakers {
    list: WordLock<Vec<(Frame, Waker)>>,
    /// Its length, for those who have no lock.
    len: AtomicUsize,
}

impl Wakers {
    fn new() -> Self {
        Self { list: WordLock::new(Vec::new()), len: AtomicUsize::new(0) }
    }

    /// Whether there are any. Those are seen whose pin is gone already, and perhaps others.
    fn any(&self) -> bool {
        // Ordering: Relaxed; the words of entries carry it, see `Entry::publish`.
        self.len.load(Ordering::Relaxed) > 0 && !mutant("load-forgets-who-is-gone")
    }

    /// Wakes those who wait for that frame.
    fn wake(&self, frame: Frame) {
        let take = || {
            let mut waiting = self.list.lock();
            let left = waiting.iter().filter(|(of, _)| *of == frame).count();
            let at = waiting.iter().position(|(of, _)| *of == frame)?;
            // Ordering: Relaxed, here and in `add`; see `any`.
            self.len.store(waiting.len() - 1, Ordering::Relaxed);
            Some((waiting.swap_remove(at).1, left))
        };
        // One by one, as they may do anything and the lock is not held meanwhile; and no more than there
        // were at first: the frame may have another load by now, whose wakers come back to the list.
        let mut most = usize::MAX;
        while most > 0 {
            let Some((waker, left)) = take() else { return };
            most = most.min(left) - 1;
            // One that panics is its task's affair: others are to be woken still, and this thread has a
            // buffer to hand over.
            if mutant("wake-unwinds") {
                waker.wake();
            } else {
                let _ = contain(|| waker.wake());
            }
        }
    }

    fn add(&self, frame: Frame, waker: &Waker) -> Result<(), GetError> {
        let new = waker.clone(); // which may do anything, as its drop may: not under the lock
        let mut waiting = self.list.lock();
        if !waiting.iter().any(|(of, known)| *of == frame && known.will_wake(waker)) {
            waiting.push((frame, new));
            self.len.store(waiting.len(), Ordering::Relaxed);
        }
        Ok(())
    }
}

/// What somebody has who asked for a block.
#[must_use = "it may be pinned"]
pub(crate) enum Asked {
    /// The place of an entry that is pinned for it: the block is there, or is being read or written.
    Pinned(Place),
    /// Nobody may have the block now: it is being discarded.
    Excluded,
}

impl Shared {
    /// Pins the entry of a block; begins to read it, if it is not there. Waits for nothing but a
    /// buffer, and for that no longer than `patience`.
    pub(crate) fn ask(
        &self,
        source: &Arc<Source>,
        key: Key,
        class: u8,
        reuse: Reuse,
        patience: Duration,
    ) -> Result<Asked, GetError> {
        hazard::reserve()?;
        self.note_want(source);
        let mut wait = BufferWait::new(patience);
        let mut rounds = 0_u32;
        loop {
            if let Some(held) = self.hit(key, class, reuse) {
                let pinned = self.entry(held.frame).pin();
                let place = self.frames.header(held.frame).place();
                held.slot.clear();
                return pinned.map(|()| Asked::Pinned(place));
            }
            source.check_read(key)?;
            let spare = match self.table.find(key) {
                Some(_) => None,
                None => {
                    let spare = self.spare(class, wait.search);
                    if spare.is_none() {
                        // Whoever has the buffers may have the block in one of them by then.
                        self.wait_for_buffers(Some(source), &mut wait)?;
                        continue;
                    }
                    spare
                }
            };
            let home = self.table.lock(key);
            match (home.find(), spare) {
                (None, Some(_)) if source.writes.excluded.has(key.sector()) => {
                    drop(home); // before the spare frame: that is another lock
                    return Ok(Asked::Excluded);
                }
                (None, Some(spare)) => {
                    // The load's pin, and ours.
                    let word = match mutant("ask-without-a-pin") {
                        true => Word::loading(spare.frame),
                        false => Word::loading(spare.frame).pinned_once_more(),
                    };
                    let Some(place) = home.insert(word) else {
                        drop(home);
                        continue;
                    };
                    let frame = spare.into_frame();
                    self.frames.header(frame).set_place(place);
                    drop(home);
                    self.counters.miss_locked.add(1);
                    let pinned = Pinned::new(self, self.table.entry(place));
                    self.begin(source, key, frame, reuse);
                    pinned.into_pin();
                    return Ok(Asked::Pinned(place));
                }
                (Some(entry), spare) => {
                    let word = entry.word();
                    let fits = self.check_class(word, class);
                    // As in `miss`; a task goes on with something else.
                    let own = !patience.is_zero() && word.has(IO | WRITE);
                    if own && hazard::named_by_me(entry) > 0 {
                        drop(home); // before the spare frame: that is another lock
                        return Err(GetError::WouldDeadlock);
                    }
                    let is_loading = word.has(IO | WRITE);
                    let full = word.pins() == MOST_PINS;
                    let pinned = fits.is_ok() && is_loading && !full && entry.try_pin(word).is_ok();
                    drop(home);
                    drop(spare); // after the home: that is another lock
                    fits?;
                    if pinned {
                        self.counters.get_locked_waited.add(1);
                        let place = self.frames.header(word.frame()).place();
                        return Ok(Asked::Pinned(place));
                    }
                    if is_loading && full {
                        return Err(GetError::TooManyPins);
                    }
                    self.wait_a_moment(&mut rounds);
                }
                (None, None) => {}
            }
        }
    }

    /// Names a buffer that this thread reads, so that it is told where it would wait for itself.
    fn name_own(&self, frame: Frame) -> Option<&'static Slot> {
        hazard::name(self.entry(frame), self.order).ok()
    }

    /// Starts the load of an entry that was just inserted. It may have ended when this returns.
    fn begin(&self, source: &Arc<Source>, key: Key, frame: Frame, reuse: Reuse) {
        let Some(load) = Load::new(source, key, frame) else {
            self.fail(source, key, frame, Failure::Closed);
            return;
        };
        self.admit(frame, key, reuse);
        self.frames.writing(frame);
        self.counters.get_read.add(1);
        source.note_load(key);
        let Err(load) = source.device.begin_read(load) else { return };
        // A thread reads it; here only if there can be none.
        if let Err(load) = self.ahead.load(load) {
            load.read();
        }
    }

    /// Makes what was read a buffer, and wakes who waits for it.
    pub(super) fn publish(&self, frame: Frame) {
        self.frames.writing(frame); // till now
        let waited_for = self.entry(frame).publish() || self.has_wakers(frame);
        if waited_for && !mutant("load-wakes-nobody") {
            self.wake_waiters(frame);
        }
    }

    pub(super) fn has_wakers(&self, frame: Frame) -> bool {
        self.wakers.of(frame).any()
    }

    /// The load of the frame is over: its entry says so already.
    pub(super) fn wake_waiters(&self, frame: Frame) {
        let header = self.frames.header(frame);
        header.loaded.advance();
        header.loaded.wake_all();
        if !mutant("load-wakes-no-task") {
            self.wakers.of(frame).wake(frame);
        }
    }

    /// Whether the entry, which the caller has pinned, has lost those marks: `IO` when its load is over,
    /// `WRITE` when a writer is done. If not, the task is woken when it has.
    pub(crate) fn poll_marks(
        &self,
        place: Place,
        marks: u64,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), GetError>> {
        let entry = self.table.entry(place);
        if entry.word().has(marks) {
            let frame = entry.word().frame();
            let wakers = self.wakers.of(frame);
            if mutant("poll-without-a-second-look") {
                linger(200);
            }
            wakers.add(frame, context.waker())?;
            if entry.word().has(marks) || mutant("poll-without-a-second-look") {
                return Poll::Pending;
            }
            // Whoever ended it may have been there before.
            wakers.wake(frame);
        }
        Poll::Ready(Ok(()))
    }

    /// Why the load failed that has the entry, which the caller has pinned; `None` if it did not.
    pub(crate) fn failure(&self, place: Place) -> Option<Failure> {
        let word = self.table.entry(place).word();
        let header = self.frames.header(word.frame());
        word.has(FAILED).then(|| Failure::from_code(header.failure()))
    }

    /// Whether nobody reads or writes the buffer of an entry that the caller has pinned.
    pub(crate) fn is_over(&self, place: Place) -> bool {
        !self.table.entry(place).word().has(IO | WRITE)
    }

    /// The frame of an entry that the caller has pinned.
    pub(crate) fn frame_at(&self, place: Place) -> Frame {
        self.table.entry(place).word().frame()
    }
}
