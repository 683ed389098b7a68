//! What makes it durable: sync, FUA, and resets.
//!
//! # The rule
//!
//! A block is durable when a sync of the device succeeded that began after the block's write ended, or when
//! that write was a durable one itself. So a sync here first writes what is dirty, then waits for a sync
//! of the device that begins after that; one that runs already is not enough.

use std::ops::Range;
use std::time::Instant;

use percpu::sync::{Arc, check, step};

use super::Shared;
use super::changes::DeviceSync;
use super::completion::Batch;
use super::task::Task;
use crate::contain::contain;
use crate::dirty::{Extents, Unsynced, WriteError};
use crate::error::GetError;
use crate::hazard;
use crate::source::{Operation, Source};
use crate::wait::Mode;
use crate::word::{BACK, DIRTY, EVICT, Entry, IO, Key, STALE, VALID, WRITE};

impl Shared {
    pub(super) fn check_sync(&self, source: &Source) -> Result<(), WriteError> {
        if source.writes.is_closed() {
            return Err(WriteError::Closed);
        }
        self.check_poison(source)
    }

    fn check_poison(&self, source: &Source) -> Result<(), WriteError> {
        source.writes.poisoned().map_or(Ok(()), |errno| Err(WriteError::Poisoned { errno }))
    }

    /// Gives the device everything that is dirty.
    pub(crate) async fn flush(&self, source: &Arc<Source>, mode: Mode) -> Result<(), WriteError> {
        self.check_sync(source)?;
        self.flush_even_closed(source, mode).await
    }

    pub(super) async fn flush_even_closed(
        &self,
        source: &Arc<Source>,
        mode: Mode,
    ) -> Result<(), WriteError> {
        let done = self.write_back(source, &Task::all(), mode).await;
        self.check_poison(source)?;
        done.error.map_or(Ok(()), Err)
    }

    /// Makes everything durable that was dirtied before.
    pub(crate) async fn sync(&self, source: &Arc<Source>, mode: Mode) -> Result<(), WriteError> {
        let losses = source.writes.group.losses();
        let flushed = self.flush(source, mode).await;
        if flushed == Err(WriteError::Closed) {
            return flushed;
        }
        // What could be written is made durable all the same.
        self.sync_device(source, losses, mode).await?;
        flushed
    }

    /// A sync of the device that begins after this call. Fails if the device has lost writes since
    /// `losses` were reported.
    pub(super) async fn sync_device(
        &self,
        source: &Arc<Source>,
        losses: u64,
        mode: Mode,
    ) -> Result<(), WriteError> {
        self.check_poison(source)?;
        if source.is_read_only {
            return Ok(()); // the cache has written nothing
        }
        let _operation = Operation::begin(&**source).ok_or(WriteError::Closed)?;
        let sync = async {
            // The sync that this one has waited for may have failed: the device would say that all is
            // well, of blocks that it has given up.
            if !check!("sync: the device is not poisoned", source.writes.poisoned().is_none()) {
                return false;
            }
            source.writes.change_unsynced(Unsynced::begin_sync);
            self.counters.syncs.add(1);
            let batch = Batch::new(source, mode);
            step!("sync: ask the device", {
                // SAFETY: the batch is waited for below.
                let sync = unsafe { DeviceSync::new(&batch) };
                // If it panics the sync is dropped, which ends it.
                let _ = contain(|| source.device.begin_sync(sync));
            });
            batch.wait().await;
            match batch.result(0) {
                Ok(()) => true,
                Err(errno) => {
                    source.writes.poison(errno.unwrap_or(libc::EIO));
                    false
                }
            }
        };
        let durable = || source.writes.change_unsynced(Unsynced::end_sync);
        if source.writes.group.join(mode, losses, sync, durable).await {
            return Ok(());
        }
        // Another's reset may have forgiven it meanwhile; ours is not durable for that.
        Err(WriteError::Poisoned { errno: source.writes.poisoned().unwrap_or(libc::EIO) })
    }

    /// Makes those blocks durable (FUA).
    pub(crate) async fn write_through(
        &self,
        source: &Arc<Source>,
        blocks: Range<u64>,
        mode: Mode,
    ) -> Result<(), WriteError> {
        self.check_sync(source)?;
        let losses = source.writes.group.losses();
        let sectors = source.sectors_of(blocks);
        let task = Task { sectors: sectors.clone(), durable: true, ..Task::all() };
        let done = self.write_back(source, &task, mode).await;
        self.check_poison(source)?;
        if let Some(error) = done.error {
            return Err(error);
        }
        // Another thread may have written them, and not durably.
        let is_synced = !source.writes.unsynced(|unsynced| unsynced.touches(&sectors));
        let is_synced = check!("write through: no sector is unsynced", is_synced);
        if is_synced { Ok(()) } else { self.sync_device(source, losses, mode).await }
    }

    /// Lets a device be written again whose sync failed. A block that was written since the last good sync is
    /// dirty again, if it stayed in the cache since the write. Returns the other blocks. These are lost even if
    /// they are cached: what was read from the device after the write need not be what was written.
    pub(crate) fn reset(&self, source: &Arc<Source>) -> Result<Vec<Range<u64>>, WriteError> {
        // Another that ends behind this one would forget what a sync has lost since.
        let mut _alone = None;
        step!("reset: one at a time", _alone = Some(source.writes.alone.lock()));
        if source.writes.poisoned().is_none() {
            return Ok(Vec::new());
        }
        step!("reset: wait for the write-backs", self.wait_for_write_backs(source)?);
        let taken = source.writes.change_unsynced(|unsynced| {
            unsynced.begin_sync();
            unsynced.syncing.clone()
        });
        let mut lost = taken.clone();
        let sectors_of_block = 1 << (source.shift - 9);
        if taken.count() / sectors_of_block <= u64::from(self.table.places()) {
            for sector in taken.iter().flat_map(|range| range.step_by(sectors_of_block as usize)) {
                self.keep_cached(source, Key::new(source.id, sector), &mut lost)?;
            }
        } else {
            // More than the cache can have, as after a large discard: what is in it is looked through.
            self.table.pass_all_locks();
            let taken = |key: &Key| {
                let sector = key.sector();
                key.device() == source.id && taken.touches(&(sector..sector + 1))
            };
            for key in self.table.keys().filter(taken) {
                self.keep_cached(source, key, &mut lost)?;
            }
        }
        // All of them stay unsynced until a sync succeeds: the device may give them up after this reset as well.
        source.writes.forgive();
        let by = source.shift - 9;
        Ok(lost.iter().map(|range| range.start >> by..range.end >> by).collect())
    }

    /// Makes a block dirty that stayed in the cache since it was written: it is not lost.
    fn keep_cached(
        &self,
        source: &Arc<Source>,
        key: Key,
        lost: &mut Extents,
    ) -> Result<(), WriteError> {
        let of_wait = |error| WriteError::of_wait(error, source.block(key));
        if self.dirty_again(source, key).map_err(of_wait)? {
            lost.remove(&source.sectors(key));
        }
        Ok(())
    }

    /// Until those are over that the failed sync may have met: what they wrote is among the unsynced
    /// sectors then, or dirty.
    fn wait_for_write_backs(&self, source: &Source) -> Result<(), WriteError> {
        let mut since = None;
        let mut walk = source.writes.dirty.lock().walk();
        while !walk.is_over() {
            let marked = {
                let list = source.writes.dirty.lock();
                let keyed = |frame| (frame, self.entry(frame).key());
                let mut frames = list.piece(&self.frames, &mut walk);
                frames.find(|frame| self.entry(*frame).word().has(BACK)).map(keyed)
            };
            let Some((frame, key)) = marked else { continue };
            let of_wait = |error| WriteError::of_wait(error, source.block(key));
            // Under another key it is another's by now.
            let is_marked = |entry: &Entry| entry.word().has(BACK) && entry.key() == key;
            while is_marked(self.entry(frame)) {
                self.wait_for_mark(frame, key, &mut since).map_err(of_wait)?;
            }
        }
        Ok(())
    }

    /// Makes a block dirty, if it stayed in the cache since it was written. A clean copy that was read from the
    /// device after the write is forgotten, so that the next get reads what the device has now. A dirty one
    /// stays, as it was modified since. Returns whether the block is not lost.
    fn dirty_again(&self, source: &Arc<Source>, key: Key) -> Result<bool, GetError> {
        let mut since: Option<Instant> = None;
        let mut rounds = 0;
        loop {
            let Some(entry) = self.table.find(key) else { return Ok(false) };
            let word = entry.word();
            // Before it is asked whether it is dirty: what the device has by now is clean in a moment.
            if word.has(WRITE | BACK) {
                if word.has(WRITE) && hazard::protected_by_me(entry) > 0 {
                    return Err(GetError::WouldDeadlock);
                }
                self.wait_for_mark(word.frame(), key, &mut since)?;
                continue;
            }
            // The load of what is `VALID` was noted before it was published.
            let is_copy = || {
                let sectors = source.sectors(key);
                !source.writes.unsynced(|unsynced| unsynced.is_reloaded(&sectors))
            };
            if word.has(DIRTY) && !word.has(STALE) && entry.key() == key {
                return Ok(is_copy());
            }
            let class = word.frame().class();
            if word.has(VALID) && !word.has(EVICT | IO | STALE) {
                // As a writer that changes nothing: the device refuses other writers meanwhile.
                if entry.try_change(word, WRITE, 0).is_ok() {
                    let is_there = entry.key() == key && word.frame().class() == class;
                    // Asked under the mark: the block is neither evicted nor loaded meanwhile.
                    if is_there && !is_copy() {
                        self.end_marks(entry, word.frame(), WRITE, 0);
                        self.invalidate_clean(source, key)?;
                        return Ok(false);
                    }
                    if is_there {
                        self.list_dirty(source, word.frame());
                        self.end_marks(entry, word.frame(), WRITE, DIRTY);
                        return Ok(true);
                    }
                    self.end_marks(entry, word.frame(), WRITE, 0);
                }
            }
            self.pause(&mut rounds, &mut since)?;
        }
    }
}
