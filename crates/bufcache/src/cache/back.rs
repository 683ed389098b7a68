//! Write-back: dirty buffers go to the device, in the order of their blocks, neighbours together.
//!
//! ```text
//!  list of dirty buffers ──copy──► sort ──► mark BACK ──► log? held back? refused? ──► window ──► write
//!                                              │                 │ yes                        │
//!                                              ▼ no more dirty   ▼                            ▼
//!                                             skip             unmark, DIRTY stays    clean, or DIRTY stays
//! ```
//!
//! # What is never done
//!
//! 1. A block is not clean before the device has said that it has it: `DIRTY` stays beside `BACK`, and
//!    the frame on the list.
//! 2. No write-back waits for another while blocks are marked for it: the window in hand is written first. A task's
//!    write-back has no thread while the device writes.
//! 3. What the device has is among the unsynced sectors before the block is clean: a sync that fails
//!    finds it there, or finds it dirty.

use std::io::IoSlice;
use std::time::Instant;

use percpu::sync::atomic::Ordering;
use percpu::sync::{Arc, check, step};

use super::Shared;
use super::changes::DeviceWrite;
use super::completion::{Batch, Outcome, RUNS};
use super::task::{Going, Task, Tries};
use crate::cold::Cold;
use crate::contain::contain;
use crate::dirty::{DirtyList, WriteError};
use crate::error::GetError;
use crate::few::Few;
use crate::frames::Frame;
use crate::hazard;
use crate::source::{Operation, Source};
use crate::wait::Mode;
use crate::word::{BACK, DIRTY, EVICT, Entry, IO, STALE, VALID, WRITE};

/// Most blocks in hand. A guess: a MiB of blocks of 4,096 bytes.
const WINDOW: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 256 };
/// Written blocks that take a lock once. A guess: a microsecond if no header is in a CPU cache. A model has two.
const TOGETHER: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 16 };

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub(crate) written: usize,
    /// A block was left out because another thread was writing it to the device.
    pub(crate) overlapped: bool,
    /// The first.
    pub(crate) error: Option<WriteError>,
}

impl Done {
    fn fail(&mut self, error: WriteError) {
        self.error.get_or_insert(error);
    }
}

/// Blocks in hand, all marked, in the order of the device.
struct Window<'t> {
    blocks: Few<Going, WINDOW>,
    task: &'t Task,
    mode: Mode,
    done: Done,
    /// A block was marked by another thread, or held back, for longer than the cache waits: others are not waited for.
    gave_up: bool,
}

/// Why a block is not written now.
enum Kept {
    /// It is clean, or gone.
    Clean,
    /// A thread writes it, or it is being written back.
    Marked,
    /// The program holds it back, or the cleaner has given it up.
    Held,
    /// The log must be flushed up to that number first.
    Log(u64),
    Because(WriteError),
}

impl Shared {
    /// Writes what a device is to be given.
    pub(crate) async fn write_back(&self, source: &Arc<Source>, task: &Task, mode: Mode) -> Done {
        let mut done = Done::default();
        let Some(_operation) = Operation::begin(&**source) else {
            done.fail(WriteError::Closed);
            return done;
        };
        let mut found = match self.dirty_blocks(source, task) {
            Ok(found) => found,
            Err(error) => {
                done.fail(error);
                return done;
            }
        };
        let found = found.all();
        found.sort_unstable_by_key(|going| going.key.sector());
        let blocks = Few::new(Going::NONE);
        let mut window = Window { blocks, task, mode, done, gave_up: false };
        for &next in &*found {
            if let Some(errno) = source.writes.poisoned() {
                // Nothing it could say makes anything durable, not even after a reset.
                window.done.fail(WriteError::Poisoned { errno });
                break;
            }
            if window.blocks.len() == WINDOW {
                self.write_window(source, &mut window).await;
            }
            self.add_to_window(source, &mut window, next).await;
        }
        self.write_window(source, &mut window).await;
        window.done
    }

    /// Marks a block and puts it into the window, which is written first where that has to wait.
    async fn add_to_window(&self, source: &Arc<Source>, window: &mut Window<'_>, next: Going) {
        let (mode, mut since, mut flushed) = (window.mode, None, 0);
        loop {
            let kept = match self.begin_back(source, window.task, next, flushed) {
                Ok(()) => return window.blocks.push(next),
                Err(Kept::Clean) => return,
                Err(Kept::Because(error)) => return window.done.fail(error),
                Err(Kept::Marked | Kept::Held) if !window.task.wait => {
                    window.done.overlapped |= self.entry(next.frame).word().has(BACK);
                    return;
                }
                Err(Kept::Marked | Kept::Held)
                    if check!("write-back: a wait has timed out", window.gave_up) =>
                {
                    return;
                }
                Err(kept) => kept,
            };
            self.write_window(source, window).await;
            let of_wait = |error| WriteError::of_wait(error, source.block(next.key));
            let waited = match kept {
                Kept::Log(number) => {
                    flushed = number;
                    self.flush_log(source, next, number, mode).await
                }
                Kept::Held => self.pause_by(mode, &mut since).await.map_err(of_wait),
                _ => self.wait_to_go(next, mode, &mut since).await.map_err(of_wait),
            };
            if let Err(error) = waited {
                window.gave_up |= matches!(error, WriteError::Busy { .. });
                return window.done.fail(error);
            }
        }
    }

    /// Waits until a thread has written the block, or the device has it, or another look is worth while.
    async fn wait_to_go(
        &self,
        Going { key, frame }: Going,
        mode: Mode,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        if mode == Mode::Task {
            return self.wait_for_mark_as_task(frame, key, since).await;
        }
        let entry = self.entry(frame);
        if entry.word().has(WRITE) && hazard::protected_by_me(entry) > 0 {
            return Err(GetError::WouldDeadlock);
        }
        self.wait_for_mark(frame, key, since)
    }

    /// Marks a block that is dirty, and may be written.
    fn begin_back(
        &self,
        source: &Arc<Source>,
        task: &Task,
        going: Going,
        flushed: u64,
    ) -> Result<(), Kept> {
        let entry = self.mark_back(going)?;
        let may_go = self.may_go(source, task, going, flushed);
        if may_go.is_err() {
            self.unmark_back(entry, going.frame, 0);
            self.drop_if_abandoned(source, going.key);
        }
        may_go
    }

    fn mark_back(&self, going: Going) -> Result<&Entry, Kept> {
        let entry = self.entry(going.frame);
        let mut word = entry.word();
        loop {
            if word.has(WRITE | BACK) && entry.key() == going.key {
                return Err(Kept::Marked);
            }
            let ready = word.has(VALID) && word.has(DIRTY) && word.frame() == going.frame;
            if !ready || word.has(WRITE | BACK | EVICT | IO | STALE) {
                return Err(Kept::Clean);
            }
            match entry.try_change(word, BACK, 0) {
                Ok(()) => break,
                Err(now) => word = now,
            }
        }
        // The frame may have had another block by then: not this task's.
        if entry.key() != going.key {
            self.unmark_back(entry, going.frame, 0);
            return Err(Kept::Clean);
        }
        Ok(entry)
    }

    /// Whether a marked block may be given to the device. What is asked about here does not change while it is
    /// marked.
    fn may_go(&self, source: &Source, task: &Task, going: Going, flushed: u64) -> Result<(), Kept> {
        let header = self.frames.header(going.frame);
        let options = &source.writes.options;
        if !check!("write-back: the block is not held back", !header.is_held()) {
            return Err(Kept::Held);
        }
        if header.tries() == u32::MAX && task.tries != Tries::All {
            return Err(Kept::Held);
        }
        let lsn = header.lsn();
        let is_flushed = check!("write-back: the log was flushed that far", lsn <= flushed);
        if let Some(wal) = options.wal.as_ref().filter(|_| !is_flushed) {
            let durable = contain(|| wal.durable());
            let block = source.block(going.key);
            match durable {
                Ok(durable) if check!("write-back: the log is durable", durable >= lsn) => {}
                Ok(_) => return Err(Kept::Log(lsn)),
                Err(_) => return Err(Kept::Because(WriteError::Panicked { block })),
            }
        }
        if let Some(look) = &options.before_write {
            let block = source.block(going.key);
            // SAFETY: invariant 1 of `frames`: no thread writes the bytes of what is marked `BACK`.
            let bytes = unsafe { self.frames.bytes(going.frame).as_ref() };
            match contain(|| look(block, bytes)) {
                Ok(true) => {}
                Ok(false) => return Err(Kept::Because(WriteError::Verify { block })),
                Err(_) => return Err(Kept::Because(WriteError::Panicked { block })),
            }
        }
        Ok(())
    }

    async fn flush_log(
        &self,
        source: &Arc<Source>,
        going: Going,
        number: u64,
        mode: Mode,
    ) -> Result<(), WriteError> {
        let Some(wal) = &source.writes.options.wal else { return Ok(()) };
        let block = source.block(going.key);
        let flushed = match mode {
            Mode::Thread => contain(|| wal.flush(number)),
            Mode::Task => {
                let wal = std::sync::Arc::clone(wal);
                self.call(source.id, move || wal.flush(number)).wait().await
            }
        };
        match flushed {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                Err(WriteError::Wal { errno, block })
            }
            Err(_) => Err(WriteError::Panicked { block }),
        }
    }

    /// Writes what the window has: neighbours together, and one by one where the device refuses that.
    async fn write_window(&self, source: &Arc<Source>, window: &mut Window<'_>) {
        let (task, mode) = (window.task, window.mode);
        let mut left = &window.blocks[..];
        let mut done = window.done;
        while !left.is_empty() {
            let mut results = [const { None }; RUNS];
            // What it was told is known once those that failed have poisoned the device.
            let writing = task.durable.then(|| source.writes.group.begin_write());
            let given = self.give_to_device(source, left, (task.durable, mode), &mut results).await;
            let (now, behind) = left.split_at(given);
            let runs = || now.chunk_by(|a, b| self.is_next(source, *a, *b)).zip(results);
            for (run, result) in runs() {
                match result {
                    Some(Ok(())) => {}
                    // In a durable one a sync may have failed: the next would say that all is well.
                    Some(Err(errno)) if run.len() == 1 || task.durable => {
                        for &one in run {
                            done.fail(self.fail_back(source, one, task, errno));
                        }
                    }
                    _ => {
                        for &one in run {
                            let mut result = [None];
                            let how = (task.durable, mode);
                            self.give_to_device(source, &[one], how, &mut result).await;
                            match result[0].unwrap_or(Err(None)) {
                                Ok(()) => {
                                    self.finish(source, &[one], task.durable);
                                    done.written += 1;
                                }
                                Err(errno) => done.fail(self.fail_back(source, one, task, errno)),
                            }
                        }
                    }
                }
            }
            let durable = match writing {
                Some(writing) => writing.end(mode).await,
                None => false,
            };
            let has_run = |result| check!("write-back: the device has it", result == Some(Ok(())));
            let mut written = Few::<_, TOGETHER>::new(Going::NONE);
            for &one in runs().filter(|(_, result)| has_run(*result)).flat_map(|(run, _)| run) {
                if written.len() == TOGETHER {
                    self.finish(source, &written, durable);
                    written.clear();
                }
                written.push(one);
                done.written += 1;
            }
            if !written.is_empty() {
                self.finish(source, &written, durable);
            }
            if task.durable && !durable {
                let errno = source.writes.poisoned().unwrap_or(libc::EIO);
                done.fail(WriteError::Poisoned { errno });
            }
            left = behind;
        }
        window.done = done;
        window.blocks.clear();
    }

    /// Whether `next` begins on the device where `one` ends.
    fn is_next(&self, source: &Source, one: Going, next: Going) -> bool {
        source.sectors(one.key).end == next.key.sector()
    }

    /// Gives the device runs of neighbours, as many as one batch takes. Returns how many blocks those have,
    /// and of each run the device's errno, or none where it panicked.
    async fn give_to_device(
        &self,
        source: &Arc<Source>,
        blocks: &[Going],
        (durable, mode): (bool, Mode),
        results: &mut [Option<Outcome>],
    ) -> usize {
        let mut parts = [IoSlice::new(&[]); WINDOW];
        for (part, going) in parts.iter_mut().zip(blocks) {
            self.frames.reading(going.frame);
            // SAFETY: invariant 1 of `frames`: no thread writes the bytes of what is marked `BACK`.
            let bytes = unsafe { self.frames.bytes(going.frame).as_ref() };
            // The last block may reach behind the end of the device.
            let left = source.len().saturating_sub(Source::offset(going.key));
            *part = IoSlice::new(&bytes[..left.min(bytes.len() as u64) as usize]);
        }
        let batch = Batch::new(source, mode);
        let depth = source.write_depth.clamp(1, RUNS);
        let neighbours = || blocks.chunk_by(|a, b| self.is_next(source, *a, *b)).take(depth);
        let alone = neighbours().nth(1).is_none();
        let (mut runs, mut given) = (0, 0);
        source.writes.load.begin_writing();
        for run in neighbours() {
            let (offset, parts) = (Source::offset(run[0].key), &parts[given..given + run.len()]);
            // SAFETY: the batch is waited for below, before it or the parts go, or a mark is taken off.
            let write = unsafe { DeviceWrite::new(&batch, (runs, alone), offset, parts, durable) };
            self.counters.write_calls.add(1);
            // If it panics the write is dropped, which ends it.
            let _ = contain(|| source.device.begin_write(write));
            (runs, given) = (runs + 1, given + run.len());
        }
        batch.wait().await;
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        if mode == Mode::Thread && runs > 1 {
            // A thread that is to wait for a disk and does not, as the page cache takes the bytes, would use up its
            // time slice, some milliseconds, while threads with little to do wait for this CPU.
            std::thread::yield_now();
        }
        source.writes.load.end_writing();
        for (number, result) in results.iter_mut().enumerate().take(runs) {
            *result = Some(batch.result(number));
        }
        given
    }

    /// The device has the blocks, of which there is one at least, and which are in its order.
    fn finish(&self, source: &Arc<Source>, blocks: &[Going], durable: bool) {
        let sectors = |run: &[Going]| {
            run.first()
                .zip(run.last())
                .map(|(first, last)| source.sectors(first.key).start..source.sectors(last.key).end)
        };
        if !durable {
            let runs = || blocks.chunk_by(|a, b| self.is_next(source, *a, *b)).filter_map(sectors);
            let note = || {
                source.writes.change_unsynced(|unsynced| {
                    runs().for_each(|sectors| unsynced.written.insert(sectors));
                });
            };
            step!("write-back: note the sectors as unsynced", note());
        }
        self.counters.written.add(blocks.len() as i64);
        source.writes.load.set_succeeding();
        blocks.iter().for_each(|one| self.frames.header(one.frame).forget_tries());
        self.unlist_dirty_if(source, blocks.iter().map(|one| one.frame), |_| true);
        for one in blocks {
            self.unmark_back(self.entry(one.frame), one.frame, DIRTY);
        }
        // Only after the marks are off: an evictor that meets a marked buffer moves it to the front again.
        step!("write-back: evict the buffers next", self.evict_next(blocks));
    }

    /// Makes the written buffers that were due for eviction the next victims. Backwards, so that they keep their order.
    fn evict_next(&self, blocks: &[Going]) {
        let mut cold = self.cold.lock();
        let Cold { nodes, policy, .. } = &mut *cold;
        blocks.iter().rev().for_each(|one| policy.evict_next(nodes, one.frame));
    }

    /// The device has refused it.
    fn fail_back(
        &self,
        source: &Arc<Source>,
        going: Going,
        task: &Task,
        errno: Option<i32>,
    ) -> WriteError {
        let block = source.block(going.key);
        let number = errno.unwrap_or(libc::EIO);
        source.writes.record(number);
        source.writes.load.set_failing(number);
        if task.durable {
            source.writes.poison(number);
        }
        let header = self.frames.header(going.frame);
        if task.tries != Tries::All {
            let rule = source.writes.options.rule(number);
            let life = self.now().saturating_sub(header.since());
            if header.count_try() >= rule.retries || u128::from(life) >= rule.within.as_millis() {
                header.give_up();
            }
        }
        self.unmark_back(self.entry(going.frame), going.frame, 0);
        self.drop_if_abandoned(source, going.key);
        match errno {
            Some(errno) => WriteError::Io { errno, block },
            None => WriteError::Panicked { block },
        }
    }

    fn unmark_back(&self, entry: &Entry, frame: Frame, clear: u64) {
        self.end_marks(entry, frame, BACK | clear, 0);
    }

    /// A buffer becomes dirty, whose entry the caller has for writing.
    pub(super) fn list_dirty(&self, source: &Arc<Source>, frame: Frame) {
        let mut list = source.writes.dirty.lock();
        let header = self.frames.header(frame);
        header.forget_tries();
        header.set_since(self.now());
        let was_empty = list.is_empty();
        list.push(&self.frames, frame);
        if was_empty {
            self.pool.add_dirty(source);
        }
        drop(list);
        source.writes.load.add_dirty(1 << self.frames.shift(frame));
        // Ordering: Relaxed; a measure.
        self.dirty_bytes.fetch_add(1 << self.frames.shift(frame), Ordering::Relaxed);
    }

    /// It is dirty no more, as it was invalidated.
    pub(super) fn unlist_dirty(&self, source: &Arc<Source>, frame: Frame) {
        self.unlist_dirty_if(source, [frame], |_| true);
    }

    /// The same of frames that may be on another device's list by now, where the list says that they are not.
    pub(super) fn unlist_dirty_if(
        &self,
        source: &Arc<Source>,
        frames: impl IntoIterator<Item = Frame>,
        are_there: impl FnOnce(&DirtyList) -> bool,
    ) {
        let mut list = source.writes.dirty.lock();
        let mut bytes = 0;
        if are_there(&list) {
            let removed = frames.into_iter().filter(|frame| list.remove(&self.frames, *frame));
            bytes = removed.map(|frame| 1 << self.frames.shift(frame)).sum();
        }
        let gone = if list.is_empty() { self.pool.remove_dirty(source) } else { None };
        drop(list);
        drop(gone); // perhaps the last of its device, outside the lock
        if bytes > 0 {
            source.writes.load.remove_dirty(bytes);
            // Ordering: Relaxed; a measure.
            self.dirty_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}
