//! What is done to a cache, and what may come of it.

use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{sleep, yield_now};

use bufcache::{BlockDevice, Device, GetError};
use testkit::block_on;

use super::disk::stamp;
use super::*;

impl World {
    /// Runs `f`; in the one thread, again as long as it has waited in vain. A loaded machine may not run the cleaner
    /// during the wait.
    fn patiently<T, E>(
        &self,
        mut f: impl FnMut() -> Result<T, E>,
        waits: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        if !self.is_exact() {
            return f();
        }
        // What stands still beside this may keep it from an end.
        let stands_still = self.marked_beside().is_some();
        let tries = if stands_still { 50 } else { 5_000 };
        for at in 1..=tries {
            let result = f();
            self.disks.iter().for_each(Disk::see_failures);
            if !result.as_ref().is_err_and(&waits) || (at == tries && stands_still) {
                return result;
            }
        }
        panic!("{} of {} are kept: it waits", self.shelf.lock().len(), self.shape.buffers);
    }

    /// Whether all buffers may be in use, or dirty for good.
    fn may_be_full(&self) -> bool {
        let is_stuck = self.disks.iter().any(|disk| disk.told().poisoned);
        let dirty = if is_stuck { self.cache.stats().dirty / SIZE } else { 0 };
        let marked = self.marked_beside().unwrap_or(0);
        let kept = self.shelf.lock().len() + self.guarded.lock().len();
        kept + dirty + marked >= self.shape.buffers
    }

    /// Whether the device may get no more dirty buffers now: its last write failed, or it has as
    /// many as are left, or the least that it may always have.
    fn may_be_limited(&self, disk: &Disk) -> bool {
        let dirty = self.cache.stats().dirty / SIZE;
        disk.failures(Operation::Write) > 0 || (dirty > 0 && 2 * dirty >= self.shape.buffers)
    }

    /// A buffer, or why not: the device failed, or refuses, or there is no buffer to be had.
    fn had<T>(
        &self,
        disk: &Disk,
        device: &Device,
        block: u64,
        (is_write, is_pinned): (bool, bool),
        f: impl FnMut() -> Result<T, GetError>,
    ) -> Result<T, GetError> {
        let (is_cached, before) = (device.is_cached(block), disk.failures(Operation::Read));
        let result = self.patiently(f, |error| match error {
            // A cached block may not be dirtied before the cleaner has written others of its device.
            GetError::NoFreeBuffers => !self.may_be_full() || (is_cached && is_write),
            GetError::Busy => !is_pinned,
            _ => false,
        });
        let Err(error) = result else { return result };
        let (is_exact, told) = (self.is_exact(), disk.told());
        let has_failed = disk.failures(Operation::Read) > before;
        let is_expected = match error {
            GetError::Io { block: of, .. }
            | GetError::ShortRead { block: of }
            | GetError::Panicked { block: of } => {
                // A device whose last write failed gets no more dirty buffers.
                let is_refused = is_write && disk.failures(Operation::Write) > 0;
                of == block && ((has_failed && !is_cached) || is_refused || !is_exact)
            }
            GetError::NoFreeBuffers => !is_cached || self.marked_beside().is_some() || !is_exact,
            GetError::Poisoned { .. } => told.poisoned || !is_exact,
            GetError::Closed => told.closed,
            GetError::Busy | GetError::WouldBlock => true,
            GetError::WouldDeadlock => is_write && is_exact,
            _ => false,
        };
        assert!(is_expected, "block {block}: {error}");
        // A failed read leaves nothing.
        assert!(!is_exact || device.is_cached(block) == is_cached, "block {block}: {error}");
        result
    }

    /// The block was read from the device, which may serve what there was before unsynced writes.
    fn read_again(&self, disk: &Disk, block: u64, bytes: &[u8]) {
        disk.told().loaded.insert(block);
        if !disk.has_reverted() {
            return;
        }
        let there = disk.versions(block, bytes, "read again");
        if there != disk.block(block).over {
            disk.forget(block, there);
            disk.told().owed.insert(block);
        }
    }

    /// Gets the block. A step of kind 1 only tries to, and one of kind 2 keeps a pin.
    pub(super) fn get(&self, which: usize, device: &Device, block: u64, op: u8, how: u8) {
        let (disk, is_try) = (&self.disks[which], op == 1);
        let is_cached = device.is_cached(block);
        let before = self.is_exact().then(|| self.cache.stats());
        let mut least = disk.block(block).over;
        let result = self.had(disk, device, block, (false, false), || match is_try {
            true => device.try_get(block),
            false => device.get(block),
        });
        if let Some(before) = before {
            let after = self.cache.stats();
            let missed = after.misses - before.misses;
            assert_eq!(after.reads - before.reads, missed);
            assert!(result.is_ok() || !is_cached, "what is cached is served: {:?}", result.err());
            assert!(result.is_err() || (missed == 0) == is_cached);
            assert!(!is_try || missed == 0, "it is not read");
        }
        let Ok(guard) = result else { return };
        if self.is_exact() && !is_cached {
            self.read_again(disk, block, &guard);
            least = disk.block(block).over;
        }
        let check = |bytes: &[u8], least| {
            let most = self.is_exact().then_some(least);
            let seen = disk.check(block, bytes, least, most, "in a guard");
            let mut of = disk.block(block);
            (0..PARTS).for_each(|part| of.over[part] = of.over[part].max(seen[part]));
            seen
        };
        let seen = check(&guard, least);
        self.reads.fetch_add(1, Relaxed);
        if op == 2 {
            let most = if self.shape.exact { 10 } else { self.shape.buffers / 2 };
            let (pin, words) = (guard.pin().unwrap(), words(block, &guard));
            drop(guard);
            let mut shelf = self.shelf.lock();
            if shelf.len() < most {
                shelf.push(Held { pin, block, words });
            }
        } else if how == 2 {
            // More than a record has slots for.
            let held: Vec<_> = (0..12).filter_map(|_| device.try_get(block).ok()).collect();
            held.iter().for_each(|held| _ = check(held, seen));
        } else if how == 3 {
            yield_now();
            check(&guard, seen);
        }
    }

    /// Reads ahead, or what is on the device.
    pub(super) fn read_by_other_means(&self, disk: &Disk, device: &Device, block: u64, how: u8) {
        match how % 4 {
            0 | 1 => device.readahead(block..block + 4),
            2 => {
                if let Ok(Some(mut load)) = device.claim(block) {
                    let read = disk.device.inner().read(load.offset(), &mut load);
                    load.finish(read);
                }
            }
            _ => {
                // The device itself, unless the cache has newer bytes.
                let (least, range) = (disk.block(block).over, block..block + 1);
                if !device.is_newer(range.clone()) || device.flush_range(range).is_ok() {
                    disk.check(block, &disk.bytes(block), least, None, "past the cache");
                }
            }
        }
    }

    pub(super) fn let_go(&self, arg: u8) {
        let mut shelf = self.shelf.lock();
        if !shelf.is_empty() {
            let at = usize::from(arg) % shelf.len();
            shelf.swap_remove(at).check();
        }
    }

    /// Whether a pin keeps the buffer that the block has, and whether a guard does.
    fn users(&self, device: &Device, block: u64) -> (bool, bool) {
        let Ok(there) = device.try_get(block) else { return (false, false) };
        let is_pinned = self.shelf.lock().iter().any(|held| held.pin.as_ptr() == there.as_ptr());
        (is_pinned, self.guarded.lock().contains(&there.as_ptr().addr()))
    }

    pub(super) fn write(&self, disk: &Disk, device: &Device, block: u64, how: u8) {
        let is_exact = self.is_exact();
        let (is_pinned, is_guarded) =
            if is_exact { self.users(device, block) } else { (false, false) };
        let is_newer = || is_exact && device.is_newer(block..block + 1);
        let (is_cached, was_newer) = (device.is_cached(block), is_newer());
        let reads = || if is_exact { self.cache.stats().reads } else { 0 };
        let before = reads();
        let (creates, is_try) = (matches!(how % 8, 3 | 4 | 7), matches!(how % 8, 5 | 7));
        let was_limited = is_exact && self.may_be_limited(disk);
        // A miss that needed a buffer has woken the cleaner, which may be writing this block now.
        let may_end = is_exact && is_cached && !is_pinned && !was_limited;
        let try_get_mut = || {
            let mut tries = 0..5_000;
            loop {
                match device.try_get_mut(block) {
                    Err(GetError::WouldBlock) if may_end && tries.next().is_some() => {
                        sleep(PATIENCE);
                    }
                    result => return result,
                }
            }
        };
        let result = self.had(disk, device, block, (true, is_pinned), || match (creates, is_try) {
            (true, true) => device.try_create(block),
            (true, false) => device.create(block),
            (false, true) => try_get_mut(),
            (false, false) => device.get_mut(block),
        });
        let mut guard = match result {
            Ok(guard) => guard,
            Err(_) if !is_exact => return,
            Err(error) => {
                let is_squeezed = was_limited || self.may_be_limited(disk);
                let is_kept = is_pinned || self.marked_beside().is_some();
                // Of `try_create` the cache says when that would wait.
                let may_wait = is_kept || is_squeezed || !is_cached || creates;
                return assert!(match error {
                    GetError::Busy => is_kept && !is_try,
                    GetError::WouldBlock => is_try && may_wait,
                    GetError::WouldDeadlock => is_guarded,
                    _ => true,
                });
            }
        };
        if creates {
            assert!(guard.iter().all(|byte| *byte == 0), "block {block} was created");
            let mut told = disk.told();
            told.owed.remove(&block);
            told.loaded.remove(&block);
        } else {
            if is_exact && !is_cached {
                self.read_again(disk, block, &guard);
            }
            let least = disk.block(block).over;
            disk.check(block, &guard, least, is_exact.then_some(least), "in a write guard");
        }
        if is_exact {
            assert!(!is_pinned && !is_guarded, "block {block} is in use");
            assert!(!disk.told().poisoned && !disk.told().closed);
            assert!(!creates || reads() == before, "it is not read");
        }
        if how % 8 == 6 {
            drop(guard); // looked at, and not changed
            return assert!(was_newer || !is_newer(), "it dirties nothing");
        }
        let version = disk.begin(block, how % 8 == 4);
        if how % 8 != 4 {
            let bytes = stamp(block, version.number);
            guard[..64].copy_from_slice(&bytes[..64]);
            if how == 1 {
                yield_now();
            }
            guard[64..].copy_from_slice(&bytes[64..]);
        }
        drop(guard);
        disk.settle(version);
        self.writes.fetch_add(1, Relaxed);
    }

    /// Whether a flush or a sync did what it was asked for. `is_own` says whether it tells the handle of writes that
    /// have failed.
    fn is_written(
        &self,
        disk: &Disk,
        (is_write_through, is_own): (bool, bool),
        mut f: impl FnMut() -> Result<(), WriteError>,
    ) -> bool {
        let [writes, syncs] = [Operation::Write, Operation::Sync].map(|of| disk.failures(of));
        // A block that an operation beside this has marked stays marked.
        let waits = |error: &WriteError| {
            matches!(error, WriteError::Busy { .. }) && self.marked_beside().is_none()
        };
        let result = self.patiently(&mut f, waits);
        let is_done = match result {
            Ok(()) | Err(WriteError::Earlier { .. }) => true,
            Err(error) => {
                assert!(may_come(&error), "{error}");
                false
            }
        };
        if !self.is_exact() {
            return is_done;
        }
        let failures = disk.failures(Operation::Write);
        let mut told = disk.told();
        assert_eq!(matches!(result, Err(WriteError::Closed)), told.closed, "{result:?}");
        // The handle has heard of them, unless the call was refused.
        let is_refused = matches!(result, Err(WriteError::Busy { .. }));
        let heard = if is_own && !is_refused { failures } else { told.failures };
        let before = std::mem::replace(&mut told.failures, heard);
        match result {
            Err(WriteError::Earlier { .. }) => {
                // The cleaner may fail between a call and the count behind it: then `before` has that failure, and
                // the handle has not heard of it.
                let is_news = failures > before || disk.has_cleaner_failed();
                assert!(is_news, "nothing has failed since");
            }
            Err(WriteError::Io { .. } | WriteError::Panicked { .. }) => {
                assert!(failures > writes, "{result:?}, and nothing has failed");
            }
            Err(WriteError::Poisoned { .. }) if !told.poisoned => {
                assert!(is_write_through && failures > writes, "poisoned by nothing");
                told.poisoned = true;
            }
            _ => {}
        }
        let poisoned = matches!(result, Err(WriteError::Poisoned { .. }));
        assert!(told.closed || poisoned == told.poisoned, "a failed sync is told: {result:?}");
        assert!(!is_done || disk.failures(Operation::Sync) == syncs, "the device has failed");
        is_done
    }

    /// Fails unless the device has what was written back.
    fn is_on_device(&self, disk: &Disk, blocks: Range<u64>) {
        if !self.shape.exact || disk.has_reverted() {
            return;
        }
        let which = self.disks.iter().position(|other| std::ptr::eq(other, disk)).unwrap();
        for block in blocks {
            let changes = self.changes_beside(which, block);
            assert!(changes || disk.is_there(block), "block {block}, written back");
        }
    }

    pub(super) fn flush(&self, disk: &Disk, device: &Device) {
        if self.is_written(disk, (false, true), || match self.shape.is_task {
            true => block_on(device.flush_async()),
            false => device.flush(),
        }) {
            self.is_on_device(disk, 0..self.shape.blocks);
        }
    }

    /// Makes the blocks durable by `f`.
    fn make_durable(
        &self,
        disk: &Disk,
        blocks: Range<u64>,
        how: (bool, bool),
        f: impl FnMut() -> Result<(), WriteError>,
    ) {
        let is_done = disk.makes_durable(blocks.clone(), || self.is_written(disk, how, f));
        if is_done && self.is_exact() {
            self.is_on_device(disk, blocks);
            let (is_write_through, _) = how;
            if !is_write_through && self.marked_beside().is_none() {
                disk.told().loaded.clear();
            }
        }
    }

    pub(super) fn sync(&self, disk: &Disk, device: &Device) {
        let of_task = self.shape.is_task && self.is_exact();
        self.make_durable(disk, 0..self.shape.blocks, (false, true), || match of_task {
            true => block_on(device.sync_async()),
            false => device.sync(),
        });
    }

    pub(super) fn write_through(&self, disk: &Disk, device: &Device, blocks: Range<u64>) {
        self.make_durable(disk, blocks.clone(), (true, true), || match self.shape.is_task {
            true => block_on(device.write_through_async(blocks.clone())),
            false => device.write_through(blocks.clone()),
        });
    }

    /// Closes the device, which makes it durable or leaves it open. Threads attach a closed one anew at once; the one
    /// thread does so by the next such step.
    pub(super) fn close(&self, which: usize) {
        let (disk, mut handle) = (&self.disks[which], self.handles[which].write().unwrap());
        if !disk.told().closed {
            let mut closed = false;
            self.make_durable(disk, 0..self.shape.blocks, (false, false), || {
                let result = match self.shape.is_task {
                    true => block_on(handle.close_async()),
                    false => handle.close(),
                };
                closed = result.is_ok();
                result
            });
            disk.told().closed = closed;
            if self.shape.exact {
                return;
            }
        }
        let mut told = disk.told();
        if told.closed {
            *handle = disk.attach(&self.cache);
            (told.closed, told.failures) = (false, disk.failures(Operation::Write));
        }
    }

    /// Puts zeros on the device, or writes to it past the cache.
    pub(super) fn wipe(&self, disk: &Disk, device: &Device, blocks: Range<u64>, how: Operation) {
        let (before, of_task) = (disk.failures(how), self.shape.is_task && self.is_exact());
        let begin = |block| disk.begin(block, how != Operation::Write);
        let versions: Vec<_> = blocks.clone().map(begin).collect();
        let bytes = versions.iter().flat_map(|version| stamp(version.block, version.number));
        let bytes: Vec<_> = bytes.collect();
        let call = || match (how, of_task) {
            (Operation::Write, _) => write_past(device, disk, &blocks, &bytes),
            (Operation::Discard, true) => block_on(device.discard_async(blocks.clone())),
            (Operation::Discard, false) => device.discard(blocks.clone()),
            (_, true) => block_on(device.zero_async(blocks.clone())),
            (_, false) => device.zero(blocks.clone()),
        };
        let result = self.patiently(call, |error| matches!(error, WriteError::Busy { .. }));
        if result.is_ok() {
            for version in versions {
                disk.settle(version);
                disk.told().owed.remove(&version.block);
                let is_cached = device.is_cached(version.block);
                assert!(!self.shape.exact || !is_cached, "block {} is forgotten", version.block);
            }
            return self.is_on_device(disk, blocks);
        }
        assert!(result.is_err_and(|error| may_come(&error)), "{result:?}");
        if self.is_exact() {
            let is_expected = match result {
                Err(WriteError::Io { .. } | WriteError::Panicked { .. }) => {
                    disk.failures(how) > before
                }
                Err(WriteError::Poisoned { .. }) => disk.told().poisoned,
                Err(WriteError::Closed) => disk.told().closed,
                // A block is marked for longer than the cache waits.
                Err(WriteError::Busy { .. }) => self.marked_beside().is_some(),
                _ => false,
            };
            assert!(is_expected, "{result:?}");
        }
        if !self.shape.exact {
            return;
        }
        for block in blocks {
            let there = device.try_get(block).map(|guard| guard.to_vec());
            let there = there.unwrap_or_else(|_| disk.bytes(block));
            let there = disk.versions(block, &there, "after a failure");
            let of = *disk.block(block);
            let is_older = |part: usize| there[part] != of.over[part] && there[part] != of.begun;
            if (0..PARTS).any(is_older) {
                assert!(disk.has_reverted(), "block {block}: {there:?} of {of:?}");
                disk.forget(block, there);
            }
            disk.block(block).over = there;
        }
    }

    pub(super) fn invalidate(&self, disk: &Disk, device: &Device, block: u64) {
        let is_cached = device.is_cached(block);
        let is_busy = |error: &GetError| *error == GetError::Busy;
        let result = self.patiently(|| device.invalidate(block), is_busy);
        if result == Err(GetError::Busy) && self.marked_beside().is_some() {
            return;
        }
        assert_eq!((result, device.is_cached(block)), (Ok(is_cached), false));
        if is_cached {
            disk.forget(block, disk.versions(block, &disk.bytes(block), "on the device"));
            disk.told().owed.remove(&block);
        }
    }

    /// Changes a block of the device that is not dirty, and forgets the one of the cache.
    pub(super) fn change_beside(&self, disk: &Disk, device: &Device, block: u64) {
        // A reset would write what the cache has.
        let _no_reset = disk.resets.read().unwrap();
        if device.flush_range(block..block + 1).is_err() {
            return;
        }
        let version = disk.begin(block, false);
        let bytes = stamp(block, version.number);
        disk.device.inner().write(block * SIZE as u64, &bytes).unwrap();
        while device.invalidate(block).is_err() {} // a writer, or the end of a load
        disk.block(block).over = [version.number; PARTS];
    }

    /// After a sync that failed. Nothing that was promised before is taken back; of the blocks that are reported
    /// as lost nothing else is.
    pub(super) fn reset(&self, disk: &Disk, device: &Device) {
        if !self.shape.exact && self.shape.lies.is_none() {
            disk.device.heal();
        }
        let is_newer = |block| self.is_exact() && device.is_newer(block..block + 1);
        let was_newer: Vec<_> = (0..self.shape.blocks).map(is_newer).collect();
        let is_own = |block| device.is_cached(block) && !disk.told().loaded.contains(&block);
        let own: Vec<_> = (0..self.shape.blocks).map(is_own).collect();
        let _alone = disk.resets.write().unwrap();
        let is_busy = |error: &WriteError| matches!(error, WriteError::Busy { .. });
        let lost = match self.patiently(|| device.reset(), is_busy) {
            Ok(lost) => lost,
            Err(error) => {
                let stands_still = self.marked_beside().is_some() && is_busy(&error);
                let is_expected = stands_still || !self.is_exact();
                return assert!(is_expected && may_come(&error), "{error}");
            }
        };
        let has_reverted = disk.has_reverted();
        for block in lost.blocks().iter().cloned().flatten() {
            let is_cached = device.is_cached(block);
            if self.is_exact() {
                // What was read from the device again is forgotten, unless it was modified then. The cleaner may
                // write it from the end of the reset on.
                let is_kept = is_newer(block) || disk.is_there(block);
                let is_kept = was_newer[block as usize] && is_kept;
                assert!(!is_cached || is_kept, "block {block} is lost");
                assert!(!own[block as usize], "block {block} is not lost: the cache had it");
            }
            disk.lose(block);
            if has_reverted && !is_cached {
                disk.forget(block, disk.versions(block, &disk.bytes(block), "on the device"));
            }
            disk.told().owed.remove(&block);
        }
        let mut told = disk.told();
        if self.is_exact() {
            assert!(told.poisoned || lost.is_empty());
            let owed = &told.owed;
            assert!(!told.poisoned || owed.is_empty(), "older bytes count as written: {owed:?}");
        }
        if std::mem::take(&mut told.poisoned) {
            told.reverts = disk.reverts();
        }
    }
}

/// Whether a flush, a sync, a wipe or a reset of any thread may return that error.
fn may_come(error: &WriteError) -> bool {
    use WriteError::{Busy, Closed, Get, Io, Panicked, Poisoned};
    matches!(error, Io { .. } | Panicked { .. } | Poisoned { .. } | Busy { .. } | Get(_) | Closed)
}

/// Writes blocks past the cache: by the cache, or by the caller where that needs no wait.
fn write_past(
    device: &Device,
    disk: &Disk,
    blocks: &Range<u64>,
    bytes: &[u8],
) -> Result<(), WriteError> {
    let by_caller = bytes[0] & 2 != 0; // every other version, from the first on
    match device.try_bypass(blocks.clone())? {
        Some(bypass) if by_caller => {
            let write = AssertUnwindSafe(|| {
                loop {
                    match disk.device.write(blocks.start * SIZE as u64, bytes) {
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        result => return result,
                    }
                }
            });
            match catch_unwind(write) {
                Ok(result) => bypass.finish(result),
                Err(_) => Err(WriteError::Panicked { block: blocks.start }),
            }
        }
        bypass => {
            drop(bypass);
            device.write_around(blocks.start, bytes)
        }
    }
}
