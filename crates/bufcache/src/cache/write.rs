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
//! up again.

use std::future::poll_fn;
use std::mem;
use std::task::Poll;
use std::time::Instant;

use percpu::sync::{Arc, check, hint, step, thread};

use super::evict::PAUSE;
use super::timer::HAS_TIME;
use super::{Held, Reuse, Shared};
use crate::engine::turn_engine;
use crate::error::GetError;
use crate::frames::{Frame, Place};
use crate::hazard;
use crate::source::Source;
use crate::wait::Mode;
use crate::word::{BACK, DIRTY, Entry, HELD, Key, WAITED, WRITE};

/// The contents of a block that was not cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// The bytes of the device.
    Read,
    /// Any bytes; the caller overwrites them.
    Caller,
}

/// The buffer that a miss returns.
pub(crate) enum Got {
    /// To be read.
    Shared(Held),
    /// To be filled by the caller, as its writer: the block was not cached and is not read.
    Locked(Held),
}

/// Why the caller does not get the lock now.
enum Obstacle {
    /// Another thread writes the block, or it is being written back.
    Marked(Frame),
    /// The block is pinned, or its entry has changed: a retry may succeed.
    Passing,
    /// The calling thread has a guard of the block.
    Own,
    /// The device is being closed.
    Closing,
}

impl Shared {
    /// Locks the buffer of a block for writing. Blocks as a miss does, and for the guards of the
    /// block.
    pub(crate) fn lock_write(
        &self,
        source: &Arc<Source>,
        key: Key,
        class: u8,
        fill: Fill,
    ) -> Result<Held, GetError> {
        source.check_write()?;
        self.limit_dirty(source, key)?;
        let mut since = None;
        let mut rounds = 0;
        loop {
            let held = match self.hit(key, class, Reuse::Likely) {
                Some(held) => held,
                None => match self.miss(source, key, class, Reuse::Likely, fill) {
                    Ok(Got::Locked(held)) => return Ok(held),
                    Ok(Got::Shared(held)) => held,
                    // Another thread's read of the block failed, which this one overwrites.
                    Err(error) if fill == Fill::Caller && error.is_of_a_read() => {
                        self.pause(&mut rounds, &mut since)?;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
            };
            let obstacle = match self.mark_write(source, &held) {
                Ok(()) => match self.wait_for_readers(held, &mut since)? {
                    Some(held) => return Ok(held),
                    None => {
                        self.pause(&mut rounds, &mut since)?;
                        continue;
                    }
                },
                Err(obstacle) => obstacle,
            };
            held.slot.clear();
            match obstacle {
                Obstacle::Own => return Err(GetError::WouldDeadlock),
                Obstacle::Closing => return Err(GetError::Closed),
                Obstacle::Marked(frame) => {
                    self.wait_for_mark(frame, key, &mut since)?;
                }
                Obstacle::Passing => self.pause(&mut rounds, &mut since)?,
            }
        }
    }

    /// Locks the buffer of a cached block for writing if that needs no wait.
    pub(crate) fn try_lock_write(
        &self,
        source: &Arc<Source>,
        key: Key,
        class: u8,
    ) -> Result<Held, GetError> {
        source.check_write()?;
        if !self.may_dirty(source, key) {
            return Err(GetError::WouldBlock);
        }
        let Some(held) = self.hit(key, class, Reuse::Likely) else {
            return Err(GetError::WouldBlock);
        };
        match self.mark_write(source, &held) {
            Ok(()) => {}
            Err(obstacle) => {
                held.slot.clear();
                return Err(match obstacle {
                    Obstacle::Own => GetError::WouldDeadlock,
                    Obstacle::Closing => GetError::Closed,
                    _ => GetError::WouldBlock,
                });
            }
        }
        if self.is_read_by_others(&held) || self.is_held(&held) {
            self.unlock_write(source, held, false);
            return Err(GetError::WouldBlock);
        }
        self.frames.writing(held.frame);
        Ok(held)
    }

    /// Sets `WRITE` on the entry that the caller's slot protects.
    fn mark_write(&self, source: &Source, held: &Held) -> Result<(), Obstacle> {
        let entry = self.entry(held.frame);
        if hazard::protected_by_me(entry) > 1 {
            return Err(Obstacle::Own);
        }
        let word = entry.word();
        if !check!("write: no write or write-back runs", !word.has(BACK | WRITE)) {
            return Err(Obstacle::Marked(held.frame));
        }
        if !word.is_readable() || word.pins() > 0 {
            return Err(Obstacle::Passing);
        }
        entry.try_change(word, WRITE, 0).map_err(|_| Obstacle::Passing)?;
        // Ordering: against the slots of readers, see `Order::barrier`; and against the SeqCst
        // fence in `Shared::close`: this thread finds the stage `Closing`, or the closer finds
        // `WRITE`.
        step!("write: the mark is set before the scan", self.order.barrier());
        if source.writes.refuses_writers() {
            self.end_marks(entry, held.frame, WRITE, 0);
            return Err(Obstacle::Closing);
        }
        Ok(())
    }

    fn is_read_by_others(&self, held: &Held) -> bool {
        let is_read = hazard::is_protected_by_others(self.entry(held.frame), held.slot);
        !check!("write: no reader is left", !is_read)
    }

    /// Returns whether a guard has become a pin since the mark. The caller has found no slot that
    /// names the entry.
    fn is_held(&self, held: &Held) -> bool {
        self.entry(held.frame).word().has(HELD)
    }

    /// Waits for the readers that came before the mark. Returns `None`, with the mark cleared, if
    /// one of them keeps a pin.
    fn wait_for_readers(
        &self,
        held: Held,
        since: &mut Option<Instant>,
    ) -> Result<Option<Held>, GetError> {
        let mut rounds = 0;
        while self.is_read_by_others(&held) {
            if let Err(error) = self.pause(&mut rounds, since) {
                self.unmark_write(held, 0);
                return Err(error);
            }
        }
        if self.is_held(&held) {
            self.unmark_write(held, 0);
            return Ok(None);
        }
        self.frames.writing(held.frame);
        Ok(Some(held))
    }

    /// Unlocks a buffer, which becomes dirty if it was `modified`.
    pub(crate) fn unlock_write(&self, source: &Arc<Source>, held: Held, modified: bool) {
        let waits = self.publish_write(source, held.frame, modified);
        held.slot.clear();
        // After the slot is cleared: a woken operation may run on this thread, and would wait for
        // it.
        self.wake_if(waits, held.frame);
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
        self.take_marks(entry, WRITE, if modified { DIRTY } else { 0 })
    }

    fn unmark_write(&self, Held { slot, frame }: Held, set: u64) {
        let waits = self.take_marks(self.entry(frame), WRITE, set);
        slot.clear();
        self.wake_if(waits, frame); // after the slot is cleared: see `unlock_write`
    }

    /// Clears marks of the caller, and wakes the threads and tasks that wait for that.
    pub(super) fn end_marks(&self, entry: &Entry, frame: Frame, marks: u64, set: u64) {
        let waits = self.take_marks(entry, marks, set);
        self.wake_if(waits, frame);
    }

    /// Clears marks of the caller. Returns whether a thread or task waits for that.
    fn take_marks(&self, entry: &Entry, marks: u64, set: u64) -> bool {
        let held = if marks & WRITE != 0 { HELD } else { 0 };
        let before = entry.change(set, marks | WAITED | held);
        before.has(WAITED) || (before.has(WRITE) && before.pins() > 0)
    }

    fn wake_if(&self, waits: bool, frame: Frame) {
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
        if turn_engine() {
            // The write may be on this thread's engine.
            return self.pause(&mut 32, since);
        }
        let header = self.frames.header(frame);
        let seen = header.loaded.load();
        let Some(entry) = self.table.find(key) else { return Ok(()) };
        if !self.set_waited(entry, frame) {
            return Ok(());
        }
        header.sleep(seen, left);
        Ok(())
    }

    /// [`wait_for_mark`](Self::wait_for_mark) for a task.
    pub(super) async fn wait_for_mark_as_task(
        &self,
        frame: Frame,
        key: Key,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        let left = self.time_left(since)?;
        let mut is_first = true;
        poll_fn(|context| {
            if !mem::take(&mut is_first) {
                self.timer.remove(context.waker());
                return Poll::Ready(Ok(()));
            }
            let wakers = self.wakers.of(frame);
            wakers.add(frame, context.waker())?;
            let entry = self.table.find(key);
            if !entry.is_some_and(|entry| self.set_waited(entry, frame)) {
                // The mark may be cleared already, and that may have woken another task.
                wakers.wake(frame);
                return Poll::Ready(Ok(()));
            }
            // A time beyond the clock's range needs no timer.
            if let Some(end) = Instant::now().checked_add(left).filter(|_| HAS_TIME) {
                self.timer.add(end, context.waker());
            }
            Poll::Pending
        })
        .await
    }

    /// Waits, as an operation of its own, until the writer of an entry ends that the caller has
    /// pinned: at most as long as the cache's patience, because the caller's task may have the guard.
    pub(crate) async fn wait_for_writer(&self, place: Place) -> Result<(), GetError> {
        let mut since = None;
        poll_fn(|context| {
            let polled = self.poll_marks(place, WRITE, context);
            if !HAS_TIME {
                return polled;
            }
            if polled.is_ready() {
                self.timer.remove(context.waker());
                return polled;
            }
            // A time beyond the clock's range needs no timer.
            match self.time_left(&mut since).map(|left| Instant::now().checked_add(left)) {
                Ok(end) => end.into_iter().for_each(|end| self.timer.add(end, context.waker())),
                Err(error) => return Poll::Ready(Err(error)),
            }
            polled
        })
        .await
    }

    /// Pauses in a wait for an event that wakes nothing, such as the drop of a guard.
    pub(super) async fn pause_by(
        &self,
        mode: Mode,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        if mode == Mode::Thread {
            return self.pause(&mut 32, since);
        }
        self.time_left(since)?;
        let mut is_first = true;
        poll_fn(|context| {
            if !mem::take(&mut is_first) {
                self.timer.remove(context.waker());
                return Poll::Ready(());
            }
            self.timer.add(Instant::now() + PAUSE, context.waker());
            Poll::Pending
        })
        .await;
        Ok(())
    }

    /// Sets `WAITED` on an entry with `WRITE` or `BACK`, so that the end of the mark wakes the
    /// caller. Returns whether it did.
    fn set_waited(&self, entry: &Entry, frame: Frame) -> bool {
        let word = entry.word();
        word.frame() == frame
            && word.has(WRITE | BACK)
            && (word.has(WAITED) || entry.try_change(word, WAITED, 0).is_ok())
    }

    /// Returns the rest of the cache's patience. The first call of a wait stores its begin in
    /// `since`.
    pub(super) fn time_left(
        &self,
        since: &mut Option<Instant>,
    ) -> Result<std::time::Duration, GetError> {
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
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        if *rounds > 32 {
            thread::sleep(PAUSE);
            return Ok(());
        }
        thread::yield_now();
        Ok(())
    }
}
