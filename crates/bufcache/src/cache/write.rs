//! The exclusive lock of a buffer, for one writer.
//!
//! ```text
//!   writer                                     reader
//!   slot = entry, as a reader                  slot = entry
//!   word |= WRITE   (readable, no pins,        fence
//!                    no BACK)                  word: WRITE? slot = null, pin, wait
//!   fence
//!   wait until no other slot names it
//!   ... write ...
//!   on the dirty list
//!   word: DIRTY, without WRITE                 is woken: slot = entry, unpin
//! ```
//!
//! A reader that waits for a writer pins the entry, which keeps the entry's block; the next writer
//! waits for the pin. A waiter for a write-back (`BACK`), or for a writer or the last pin in order to
//! write, has neither slot nor pin: it sets `WAITED`, waits at the frame, and looks the block up again.
//! A writer that waits for guards of readers, whose drop wakes nothing, looks again after each pause.

use std::time::Instant;

use offlock_sync::{Arc, check, step};

use super::miss::{EnterResult, Fill, Pinned};
use super::{Protected, Search, Shared};
use crate::error::GetError;
use crate::frames::Frame;
use crate::hazard::{self, Slot};
use crate::source::Source;
use crate::wait::{block_on, is_blocking, run};
use crate::word::{BACK, DIRTY, Entry, EntryWord, Key, READER_PIN, WAITED, WRITE};

/// Returns whether a writer or a write-back has a buffer.
pub(super) fn is_marked(word: EntryWord) -> bool {
    word.has(WRITE | BACK)
}

/// Returns whether a writer, a write-back or a pin keeps other threads from locking a buffer.
fn is_marked_or_pinned(word: EntryWord) -> bool {
    is_marked(word) || (word.is_readable() && word.pins() > 0)
}

/// Returns whether a slot other than `mine` protects an entry that the caller has marked `WRITE`.
fn is_read(entry: &Entry, mine: Option<&Slot>) -> bool {
    !check!("write: no reader is left", !hazard::is_protected(entry, mine))
}

/// A buffer that is locked for writing. The mark alone keeps it, so this may move to another thread.
/// Its drop unlocks the buffer.
#[must_use = "a drop unlocks the buffer"]
pub(crate) struct Locked {
    /// `None` once the lock is the caller's.
    source: Option<Arc<Source>>,
    frame: Frame,
    /// With `Caller` the bytes may be those of another block, and become zeros.
    fill: Fill,
}

impl Locked {
    /// Leaves the lock to the caller.
    pub(crate) fn into_frame(mut self) -> Frame {
        if let Some(source) = self.source.take() {
            source.cache.fill(&source, self.frame, self.fill);
        }
        self.frame
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let Some(source) = self.source.take() else { return };
        source.cache.fill(&source, self.frame, self.fill);
        source.cache.unlock_write(&source, None, self.frame, self.fill == Fill::Caller);
    }
}

impl Shared {
    /// Locks the buffer of a block for writing. Blocks the thread.
    pub(crate) fn lock_by_thread(
        &self,
        source: &Arc<Source>,
        key: Key,
        fill: Fill,
    ) -> Result<Protected, GetError> {
        // Without a future if that needs no wait.
        match self.lock_at_once(source, key, fill, Search::UntilDirty) {
            Err(GetError::WouldBlock) => {}
            locked => return locked,
        }
        let locked = block_on(self.lock_write(source, key, fill))?;
        // Without a fence, as the mark keeps the entry; and without an allocation, as `mark_write` has had a
        // slot of this thread.
        let slot = hazard::protect_kept(self.entry(locked.frame))?;
        Ok(Protected { slot, frame: locked.into_frame() })
    }

    /// Locks the buffer of a block for writing, as a thread. Waits for nothing but its own read of the
    /// device; returns [`GetError::WouldBlock`] instead, also if too much is dirty.
    pub(crate) fn lock_at_once(
        &self,
        source: &Arc<Source>,
        key: Key,
        fill: Fill,
        search: Search,
    ) -> Result<Protected, GetError> {
        source.check_write()?;
        if self.must_clean(source) || !self.may_dirty(source, key) {
            return Err(GetError::WouldBlock);
        }
        let buffer = match self.hit(key) {
            Some(buffer) => self.lock_protected(source, buffer, true)?,
            None if self.lookup.is_cached(key) => return Err(GetError::WouldBlock),
            None => match self.enter(source, key, fill, search, true)? {
                EnterResult::Locked(buffer) => buffer,
                EnterResult::Cached(buffer) => self.lock_protected(source, buffer, true)?,
                EnterResult::Pinned(frame) if self.has_ended(frame) && fill == Fill::Read => {
                    let buffer = self.protect_loaded(source, key, frame)?;
                    self.lock_protected(source, buffer, true)?
                }
                EnterResult::Pinned(frame) => {
                    self.unpin(frame);
                    return Err(GetError::WouldBlock);
                }
                _ => return Err(GetError::WouldBlock),
            },
        };
        self.fill(source, buffer.frame, fill);
        Ok(buffer)
    }

    /// Locks the buffer of a block for writing, for a thread or a task. Waits as a miss does, and for the
    /// guards and pins of the block.
    ///
    /// A task waits in the queue of the block for a writer, a write-back or a pin; dropping the future
    /// ends that wait. The other waits go on without the task, because they may write other blocks, or
    /// keep readers from this one.
    pub(crate) async fn lock_write(
        &self,
        source: &Arc<Source>,
        key: Key,
        fill: Fill,
    ) -> Result<Locked, GetError> {
        let blocks = is_blocking().await;
        let (mut rounds, mut since, mut queued) = (0, None, None);
        loop {
            source.check_write()?;
            // A task begins no operation if it need not wait.
            let may_try = !blocks && !self.must_clean(source);
            let locked = if may_try { self.try_lock(source, key, false).ok() } else { None };
            if let Some(Protected { slot, frame }) = locked {
                slot.clear(); // the mark keeps the buffer
                return Ok(Locked { source: Some(Arc::clone(source)), frame, fill });
            }
            let found = self.lookup.find(key).map(Entry::word);
            if let Some(word) = found.filter(|word| is_marked_or_pinned(*word)) {
                if blocks && is_marked(word) && !source.may_wait() {
                    return Err(GetError::WouldDeadlock);
                }
                if !blocks && queued.is_none() {
                    queued = Some(self.waiting.enqueue(key, &mut since).await?);
                    continue;
                }
                self.wait_for_mark(word.frame(), key, is_marked_or_pinned, &mut since).await?;
                continue;
            }
            let locked = if blocks {
                self.lock_slowly(source, key, fill, &mut since).await?
            } else {
                let (source, mut begun) = (Arc::clone(source), since);
                let lock = async move {
                    let shared = &source.cache;
                    let locked = shared.lock_slowly(&source, key, fill, &mut begun).await;
                    (locked, begun)
                };
                let (locked, begun) = run(lock).await;
                since = begun;
                locked?
            };
            if let Some(locked) = locked {
                return Ok(locked);
            }
            self.waiting.pause(&mut rounds, &mut since).await?;
        }
    }

    /// Loads or creates a block that is not cached, and waits for the readers of one that is. Returns
    /// `None` if the block is marked or pinned then.
    async fn lock_slowly(
        &self,
        source: &Arc<Source>,
        key: Key,
        fill: Fill,
        since: &mut Option<Instant>,
    ) -> Result<Option<Locked>, GetError> {
        self.limit_dirty(source, key).await?;
        let own = Some(Arc::clone(source));
        let Protected { slot, frame } =
            match self.miss(source, key, fill, self.waiting.patience).await? {
                EnterResult::Locked(Protected { slot, frame }) => {
                    slot.clear(); // the mark keeps the buffer
                    return Ok(Some(Locked { source: own, frame, fill }));
                }
                EnterResult::Pinned(frame) => {
                    let entry = self.entry(frame);
                    let _pinned = Pinned(self, frame);
                    if entry.word().has(WRITE) {
                        return Ok(None);
                    }
                    match self.wait_for_load(source, key, frame).await {
                        // Another thread's read of the block failed, which this one overwrites.
                        Err(error) if fill == Fill::Caller && error.is_of_a_read() => {
                            return Ok(None);
                        }
                        loaded => loaded?,
                    }
                    let slot = hazard::protect_kept(entry)?; // kept by the pin
                    Protected { slot, frame }
                }
                EnterResult::Cached(buffer) => buffer,
                _ => return Ok(None),
            };
        let marked = self.mark_write(source, &Protected { slot, frame }, is_blocking().await);
        slot.clear();
        match marked {
            Err(GetError::WouldBlock) => return Ok(None),
            marked => marked?,
        }
        // Until no reader is left, the drop changes no bytes.
        let mut locked = Locked { source: own, frame, fill: Fill::Read };
        let (mut rounds, entry) = (0, self.entry(frame));
        while is_read(entry, None) {
            self.waiting.pause(&mut rounds, since).await?;
        }
        if entry.word().has(READER_PIN) {
            return Ok(None);
        }
        self.frames.writing(frame);
        locked.fill = fill;
        Ok(Some(locked))
    }

    /// Fills a buffer that the caller has locked with zeros, unless it has the bytes of its block.
    pub(super) fn fill(&self, source: &Source, frame: Frame, fill: Fill) {
        if fill == Fill::Read {
            return;
        }
        source.writes.forget_load(&source.sectors(self.entry(frame).key()));
        let mut bytes = self.frames.bytes(frame);
        // SAFETY: invariant 1 of `frames`: the mark makes the caller the owner of the bytes.
        unsafe { bytes.as_mut() }.fill(0);
    }

    /// Locks the buffer of a cached block that no other thread uses, if it may become dirty now.
    /// `blocks` tells whether a guard of the calling thread is one of the caller.
    pub(crate) fn try_lock(
        &self,
        source: &Arc<Source>,
        key: Key,
        blocks: bool,
    ) -> Result<Protected, GetError> {
        source.check_write()?;
        if !self.may_dirty(source, key) {
            return Err(GetError::WouldBlock);
        }
        let buffer = self.hit(key).ok_or(GetError::WouldBlock)?;
        self.lock_protected(source, buffer, blocks)
    }

    /// Locks a buffer that no other thread uses. If it is refused, clears the slot.
    fn lock_protected(
        &self,
        source: &Arc<Source>,
        buffer: Protected,
        blocks: bool,
    ) -> Result<Protected, GetError> {
        if let Err(refused) = self.mark_write(source, &buffer, blocks) {
            buffer.slot.clear();
            return Err(refused);
        }
        let entry = self.entry(buffer.frame);
        // A guard may have become a pin since the mark.
        if is_read(entry, Some(buffer.slot)) || entry.word().has(READER_PIN) {
            self.unlock_write(source, Some(buffer.slot), buffer.frame, false);
            return Err(GetError::WouldBlock);
        }
        self.frames.writing(buffer.frame);
        Ok(buffer)
    }

    /// Sets `WRITE` on the entry that the caller's slot protects. [`GetError::WouldBlock`] if another
    /// thread keeps the block, or its entry has changed.
    fn mark_write(
        &self,
        source: &Source,
        buffer: &Protected,
        blocks: bool,
    ) -> Result<(), GetError> {
        let entry = self.entry(buffer.frame);
        if blocks && hazard::protected_by_me(entry) > 1 {
            return Err(GetError::WouldDeadlock);
        }
        let word = entry.word();
        let is_free = check!("write: no write or write-back runs", !word.has(BACK | WRITE));
        if !is_free || !word.is_readable() || word.pins() > 0 {
            return Err(GetError::WouldBlock);
        }
        entry.try_change(word, WRITE, 0).map_err(|_| GetError::WouldBlock)?;
        // Ordering: against the slots of readers, see `hazard::barrier`; and against the SeqCst
        // fence in `Shared::close`: this thread finds the stage `Closing`, or the closer finds
        // `WRITE`.
        step!("write: the mark is set before the scan", hazard::barrier());
        if source.writes.refuses_writers() {
            self.clear_marks_and_wake(entry, buffer.frame, WRITE, 0);
            return Err(GetError::Closed);
        }
        Ok(())
    }

    /// Unlocks a buffer, which becomes dirty if it was `modified`. A task has no slot: the mark alone keeps
    /// the buffer from eviction.
    pub(crate) fn unlock_write(
        &self,
        source: &Arc<Source>,
        slot: Option<&Slot>,
        frame: Frame,
        modified: bool,
    ) {
        let entry = self.entry(frame);
        if modified && !entry.word().has(DIRTY) {
            self.write_back.list(&self.frames, source, frame);
        }
        let waits = self.clear_marks(entry, WRITE, if modified { DIRTY } else { 0 });
        slot.inspect(|slot| slot.clear());
        // After the slot is cleared: a woken operation may run on this thread, and would wait for
        // it.
        self.wake_if(waits, frame);
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
            step!("write: wake the waiters", self.waiting.wake(frame));
        }
    }

    /// Waits for the writer, the write-back or the last pin of a block, while `waited_for` holds for its
    /// word; at most for the patience of the cache. Refuses to wait for a guard of this thread. The caller has
    /// neither slot nor pin. May return early, so the caller looks the block up again.
    pub(super) async fn wait_for_mark(
        &self,
        frame: Frame,
        key: Key,
        waited_for: fn(EntryWord) -> bool,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        let is_own = |entry: &Entry| entry.word().has(WRITE) && hazard::protected_by_me(entry) > 0;
        if is_blocking().await && self.lookup.find(key).is_some_and(is_own) {
            return Err(GetError::WouldDeadlock);
        }
        let end = self.waiting.end(since)?;
        let look = || {
            // With the waker in the set: either this finds that the block is free, or the thread
            // that frees it finds `WAITED`.
            let entry = self.lookup.find(key);
            let waits = entry.is_some_and(|entry| set_waited(entry, frame, waited_for));
            (!check!("wait: the block is kept", waits)).then_some(())
        };
        self.waiting.wait(frame.0.into(), end, look).await;
        Ok(())
    }
}

/// Sets `WAITED` on an entry if `waited_for` holds for its word, so that the end of the mark or of the
/// last pin wakes the caller. Returns whether the flag is set.
fn set_waited(entry: &Entry, frame: Frame, waited_for: fn(EntryWord) -> bool) -> bool {
    let word = entry.word();
    word.frame() == frame
        && waited_for(word)
        && (word.has(WAITED) || entry.try_change(word, WAITED, 0).is_ok())
}
