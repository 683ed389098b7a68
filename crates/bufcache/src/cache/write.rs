//! The exclusive lock of a buffer, for one writer.
//!
//! ```text
//!   writer                                     reader
//!   slot = entry, as a reader                  slot = entry
//!   word |= WRITE   (readable, no pins,        fence
//!                    no BACK)                  word: WRITE? slot = null, pin, sleep
//!   fence
//!   wait until no other slot names it
//!   ... write ...
//!   on the dirty list
//!   word: DIRTY, without WRITE                 is woken: slot = entry, unpin
//! ```
//!
//! A reader that waits for a writer pins the entry, which keeps the entry's block; the next writer
//! waits for the pin. A thread that waits for a write-back (`BACK`), or waits for a writer in order
//! to write, has neither slot nor pin: it sets `WAITED`, sleeps at the frame, and looks the block
//! up again. The first task [in line](super::wait_queue) does the same with its waker, also for the last
//! pin. For guards of readers, whose drop wakes nothing, a thread of the cache waits in its place.

use std::future::poll_fn;
use std::mem;
use std::task::Poll;
use std::time::{Duration, Instant};

use offlock_sync::{Arc, check, hint, step, thread};

use super::evict::PAUSE;
use super::wait_queue::HAS_TIME;
use super::{Protected, Shared};
use crate::error::GetError;
use crate::frames::{Frame, Place};
use crate::hazard;
use crate::source::Source;
use crate::wait::is_blocking;
use crate::word::{BACK, DIRTY, Entry, EntryWord, Key, READER_PIN, WAITED, WRITE};

/// The contents of a block that was not cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// The bytes of the device.
    Read,
    /// Any bytes; the caller overwrites them.
    Caller,
}

/// A request for a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRequest {
    /// The contents of a block that was not cached.
    pub(crate) fill: Fill,
    pub(crate) wait: Wait,
}

/// What a requester of a block blocks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// A buffer, the load of the block, and its writer.
    Block,
    /// A buffer and the load, by a thread that serves a task: the task waits for the writer.
    Load,
    /// Nothing.
    None,
}

/// The buffer that a miss returns.
pub(crate) enum MissResult {
    /// To be read.
    Shared(Protected),
    /// To be filled by the caller, as its writer: the block was not cached and is not read.
    Locked(Protected),
}

/// Why the caller does not get the lock now.
enum LockRefused {
    /// Another thread writes the block, or it is being written back.
    Marked(Frame),
    /// The block is pinned, or its entry has changed: a retry may succeed.
    Passing,
    /// The calling thread has a guard of the block.
    Own,
    /// The device is being closed.
    Closing,
}

/// Returns whether a writer or a write-back has a buffer.
fn is_marked(word: EntryWord) -> bool {
    word.has(WRITE | BACK)
}

/// Returns whether a writer, a write-back or a pin keeps other threads from locking a buffer.
fn is_marked_or_pinned(word: EntryWord) -> bool {
    is_marked(word) || (word.is_readable() && word.pins() > 0)
}

impl Shared {
    /// Locks the buffer of a block for writing. Blocks as a miss does, and for the guards of the
    /// block.
    pub(crate) fn lock_write(
        &self,
        source: &Arc<Source>,
        key: Key,
        fill: Fill,
    ) -> Result<Protected, GetError> {
        source.check_write()?;
        self.limit_dirty(source, key)?;
        let want = BlockRequest { fill, wait: Wait::Block };
        let (mut rounds, mut since) = (0, None);
        loop {
            match self.lock_once(source, key, want, &mut since)? {
                Ok(buffer) => return Ok(buffer),
                Err(LockRefused::Marked(frame)) => {
                    if !source.may_wait() {
                        return Err(GetError::WouldDeadlock);
                    }
                    self.wait_for_mark(frame, key, &mut since)?;
                }
                Err(_) => self.pause(&mut rounds, &mut since)?,
            }
        }
    }

    /// Does the work of [`lock_write`](Self::lock_write) for a task, which waits for the holder of
    /// the block itself: returns `None` if a writer, a write-back or a pin keeps the block.
    pub(crate) fn lock_write_for_task(
        &self,
        source: &Arc<Source>,
        key: Key,
        fill: Fill,
        since: &mut Option<Instant>,
    ) -> Result<Option<Protected>, GetError> {
        source.check_write()?;
        self.limit_dirty(source, key)?;
        let want = BlockRequest { fill, wait: Wait::Load };
        let mut rounds = 0;
        loop {
            if let Ok(buffer) = self.lock_once(source, key, want, since)? {
                return Ok(Some(buffer));
            }
            if self.is_marked_or_pinned(key) {
                return Ok(None);
            }
            self.pause(&mut rounds, since)?;
        }
    }

    /// Returns whether a writer, a write-back or a pin keeps a task from locking a block.
    pub(crate) fn is_marked_or_pinned(&self, key: Key) -> bool {
        self.table.find(key).is_some_and(|entry| is_marked_or_pinned(entry.word()))
    }

    /// Tries to lock the buffer of a block. Blocks as a miss does, and for guards of readers.
    fn lock_once(
        &self,
        source: &Arc<Source>,
        key: Key,
        want: BlockRequest,
        since: &mut Option<Instant>,
    ) -> Result<Result<Protected, LockRefused>, GetError> {
        let buffer = match self.hit(key) {
            Some(buffer) => buffer,
            None => match self.miss(source, key, want) {
                Ok(MissResult::Locked(buffer)) => return Ok(Ok(buffer)),
                Ok(MissResult::Shared(buffer)) => buffer,
                Err(GetError::WouldBlock) => return Ok(Err(LockRefused::Passing)), // a writer has it
                // Another thread's read of the block failed, which this one overwrites.
                Err(error) if want.fill == Fill::Caller && error.is_of_a_read() => {
                    return Ok(Err(LockRefused::Passing));
                }
                Err(error) => return Err(error),
            },
        };
        let obstacle = match self.mark_write(source, &buffer) {
            Ok(()) => {
                return Ok(self.wait_for_readers(buffer, since)?.ok_or(LockRefused::Passing));
            }
            Err(obstacle) => obstacle,
        };
        buffer.slot.clear();
        match obstacle {
            LockRefused::Own => Err(GetError::WouldDeadlock),
            LockRefused::Closing => Err(GetError::Closed),
            obstacle => Ok(Err(obstacle)),
        }
    }

    /// Locks the buffer of a cached block for writing if that needs no wait.
    /// [`GetError::WouldDeadlock`] for a guard of the calling thread: if the caller is a task, the
    /// guard is not the task's, and the task may wait for its drop.
    pub(crate) fn try_lock_write(
        &self,
        source: &Arc<Source>,
        key: Key,
    ) -> Result<Protected, GetError> {
        source.check_write()?;
        if !self.may_dirty(source, key) {
            return Err(GetError::WouldBlock);
        }
        let Some(buffer) = self.hit(key) else {
            return Err(GetError::WouldBlock);
        };
        match self.mark_write(source, &buffer) {
            Ok(()) => {}
            Err(obstacle) => {
                buffer.slot.clear();
                return Err(match obstacle {
                    LockRefused::Own => GetError::WouldDeadlock,
                    LockRefused::Closing => GetError::Closed,
                    _ => GetError::WouldBlock,
                });
            }
        }
        if self.is_read_by_others(&buffer) || self.has_reader_pin(&buffer) {
            self.unlock_write(source, buffer, false);
            return Err(GetError::WouldBlock);
        }
        self.frames.writing(buffer.frame);
        Ok(buffer)
    }

    /// Sets `WRITE` on the entry that the caller's slot protects.
    fn mark_write(&self, source: &Source, buffer: &Protected) -> Result<(), LockRefused> {
        let entry = self.entry(buffer.frame);
        if hazard::protected_by_me(entry) > 1 {
            return Err(LockRefused::Own);
        }
        let word = entry.word();
        if !check!("write: no write or write-back runs", !word.has(BACK | WRITE)) {
            return Err(LockRefused::Marked(buffer.frame));
        }
        if !word.is_readable() || word.pins() > 0 {
            return Err(LockRefused::Passing);
        }
        entry.try_change(word, WRITE, 0).map_err(|_| LockRefused::Passing)?;
        // Ordering: against the slots of readers, see `hazard::barrier`; and against the SeqCst
        // fence in `Shared::close`: this thread finds the stage `Closing`, or the closer finds
        // `WRITE`.
        step!("write: the mark is set before the scan", hazard::barrier());
        if source.writes.refuses_writers() {
            self.clear_marks_and_wake(entry, buffer.frame, WRITE, 0);
            return Err(LockRefused::Closing);
        }
        Ok(())
    }

    fn is_read_by_others(&self, buffer: &Protected) -> bool {
        let is_read = hazard::is_protected_by_others(self.entry(buffer.frame), buffer.slot);
        !check!("write: no reader is left", !is_read)
    }

    /// Returns whether a guard has become a pin since the mark. The caller has found no slot that
    /// names the entry.
    fn has_reader_pin(&self, buffer: &Protected) -> bool {
        self.entry(buffer.frame).word().has(READER_PIN)
    }

    /// Waits for the readers that came before the mark. Returns `None`, with the mark cleared, if
    /// one of them keeps a pin.
    fn wait_for_readers(
        &self,
        buffer: Protected,
        since: &mut Option<Instant>,
    ) -> Result<Option<Protected>, GetError> {
        let mut rounds = 0;
        while self.is_read_by_others(&buffer) {
            if let Err(error) = self.pause(&mut rounds, since) {
                self.unmark_write(buffer, 0);
                return Err(error);
            }
        }
        if self.has_reader_pin(&buffer) {
            self.unmark_write(buffer, 0);
            return Ok(None);
        }
        self.frames.writing(buffer.frame);
        Ok(Some(buffer))
    }

    /// Unlocks a buffer, which becomes dirty if it was `modified`.
    pub(crate) fn unlock_write(&self, source: &Arc<Source>, buffer: Protected, modified: bool) {
        let waits = self.publish_write(source, buffer.frame, modified);
        buffer.slot.clear();
        // After the slot is cleared: a woken operation may run on this thread, and would wait for
        // it.
        self.wake_if(waits, buffer.frame);
    }

    /// Unlocks a buffer that no slot names; the mark alone keeps it from eviction.
    pub(crate) fn end_write(&self, source: &Arc<Source>, frame: Frame, modified: bool) {
        let waits = self.publish_write(source, frame, modified);
        self.wake_if(waits, frame);
    }

    /// Clears `WRITE`. Returns whether a thread or task waits for that.
    fn publish_write(&self, source: &Arc<Source>, frame: Frame, modified: bool) -> bool {
        let entry = self.entry(frame);
        if modified && !entry.word().has(DIRTY) {
            self.list_dirty(source, frame);
        }
        self.clear_marks(entry, WRITE, if modified { DIRTY } else { 0 })
    }

    fn unmark_write(&self, Protected { slot, frame }: Protected, set: u64) {
        let waits = self.clear_marks(self.entry(frame), WRITE, set);
        slot.clear();
        self.wake_if(waits, frame); // after the slot is cleared: see `unlock_write`
    }

    /// Clears marks of the caller, and wakes the threads and tasks that wait for that.
    pub(super) fn clear_marks_and_wake(&self, entry: &Entry, frame: Frame, marks: u64, set: u64) {
        let waits = self.clear_marks(entry, marks, set);
        self.wake_if(waits, frame);
    }

    /// Clears marks of the caller. Returns whether a thread or task waits for that.
    fn clear_marks(&self, entry: &Entry, marks: u64, set: u64) -> bool {
        let reader_pin = if marks & WRITE != 0 { READER_PIN } else { 0 };
        let before = entry.change(set, marks | WAITED | reader_pin);
        before.has(WAITED) || (before.has(WRITE) && before.pins() > 0)
    }

    pub(super) fn wake_if(&self, waits: bool, frame: Frame) {
        if waits {
            // The frame may belong to another block by now: then the wake-up is spurious.
            step!("write: wake the waiters", self.wake_waiters(frame));
        }
    }

    /// Sleeps until the write or write-back of a block ends. The caller has neither slot nor pin.
    ///
    /// May return early, so the caller looks the block up again.
    pub(super) fn wait_for_mark(
        &self,
        frame: Frame,
        key: Key,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        let left = self.time_left(since)?;
        let header = self.frames.header(frame);
        let seen = header.loaded.load();
        let Some(entry) = self.table.find(key) else { return Ok(()) };
        if !self.set_waited(entry, frame, is_marked) {
            return Ok(());
        }
        header.sleep(seen, left);
        Ok(())
    }

    /// Waits, as a task, for the writer, the write-back or the last pin that keeps a cached block
    /// from being locked. Returns whether there was one. May return early, so the caller looks the
    /// block up again.
    pub(crate) async fn wait_to_lock(
        &self,
        key: Key,
        since: &mut Option<Instant>,
    ) -> Result<bool, GetError> {
        let Some(word) =
            self.table.find(key).map(Entry::word).filter(|&word| is_marked_or_pinned(word))
        else {
            return Ok(false);
        };
        self.wait_at_frame(word.frame(), key, is_marked_or_pinned, since).await?;
        Ok(true)
    }

    /// [`wait_for_mark`](Self::wait_for_mark) for a task.
    pub(super) async fn wait_for_mark_as_task(
        &self,
        frame: Frame,
        key: Key,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        self.wait_at_frame(frame, key, is_marked, since).await
    }

    /// Waits, as a task, until the waiters at the frame of a block are woken, or until the patience
    /// is over; not at all unless `waited_for` holds for the word of the block.
    async fn wait_at_frame(
        &self,
        frame: Frame,
        key: Key,
        waited_for: fn(EntryWord) -> bool,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        let end = self.end_of_patience(self.time_left(since)?);
        let look = || {
            // With the waker in the set: either this finds that the block is free, or the thread
            // that frees it finds `WAITED`.
            let entry = self.table.find(key);
            let waits = entry.is_some_and(|entry| self.set_waited(entry, frame, waited_for));
            (!check!("wait: the block is kept", waits)).then_some(())
        };
        self.wait_as_task(frame, end, look).await;
        Ok(())
    }

    /// Returns when a wait of that time ends. `None` beyond the range of the clock, and in a model.
    pub(super) fn end_of_patience(&self, left: Duration) -> Option<Instant> {
        Instant::now().checked_add(left).filter(|_| HAS_TIME)
    }

    /// Waits, as a task, until the writer of an entry ends. The caller has pinned the entry. The
    /// cache's patience limits the wait, because the caller's task may have the guard.
    pub(crate) async fn wait_for_writer(&self, place: Place) -> Result<(), GetError> {
        let end = self.end_of_patience(self.time_left(&mut None)?);
        let entry = self.table.entry(place);
        let look = || (!entry.word().has(WRITE)).then_some(());
        self.wait_as_task(entry.word().frame(), end, look).await.ok_or(GetError::Busy)
    }

    /// Pauses in a wait for an event that wakes nothing, such as the drop of a guard.
    pub(super) async fn pause_by(&self, since: &mut Option<Instant>) -> Result<(), GetError> {
        if is_blocking().await {
            return self.pause(&mut 32, since);
        }
        self.time_left(since)?;
        let (mut is_first, mut alarm) = (true, self.timer.alarm());
        poll_fn(|context| {
            if !mem::take(&mut is_first) {
                return Poll::Ready(());
            }
            alarm.set(Instant::now() + PAUSE, context.waker());
            Poll::Pending
        })
        .await;
        Ok(())
    }

    /// Sets `WAITED` on an entry if `waited_for` holds for its word, so that the end of the mark or
    /// of the last pin wakes the caller. Returns whether the flag is set.
    fn set_waited(&self, entry: &Entry, frame: Frame, waited_for: fn(EntryWord) -> bool) -> bool {
        let word = entry.word();
        word.frame() == frame
            && waited_for(word)
            && (word.has(WAITED) || entry.try_change(word, WAITED, 0).is_ok())
    }

    /// Returns the rest of the cache's patience. The first call of a wait stores its begin in
    /// `since`.
    pub(super) fn time_left(&self, since: &mut Option<Instant>) -> Result<Duration, GetError> {
        let waited = since.get_or_insert_with(Instant::now).elapsed();
        self.patience.checked_sub(waited).filter(|left| !left.is_zero()).ok_or(GetError::Busy)
    }

    /// Lets other threads run, for longer in each round.
    pub(super) fn pause(
        &self,
        rounds: &mut u32,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        *rounds = rounds.saturating_add(1);
        if *rounds < 16 {
            hint::spin_loop();
            return Ok(());
        }
        self.time_left(since)?;
        #[cfg(not(offlock_model))]
        if *rounds > 32 {
            thread::sleep(PAUSE);
            return Ok(());
        }
        thread::yield_now();
        Ok(())
    }
}
