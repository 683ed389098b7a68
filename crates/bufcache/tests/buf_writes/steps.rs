//! What is done to a cache, and what may come of it.

use std::cell::Cell;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bufcache::BlockDevice;
use testkit::block_on;

use super::*;

/// A change of a device past the cache.
pub(super) struct Wipe {
    pub(super) which: usize,
    pub(super) blocks: Range<u64>,
    pub(super) values: Vec<u32>,
    how: Operation,
    /// How many of these operations had failed before.
    before: u64,
    /// The device was neither poisoned nor closed.
    open: bool,
}

impl Wipe {
    fn each(&self) -> impl Iterator<Item = (u64, &[u32])> {
        self.blocks.clone().zip(self.values.chunks(PARTS))
    }
}

impl<'d> Machine<'d> {
    pub(super) fn arm(&mut self, which: usize, kind: u8, what: u8) {
        self.gave_up |= self.disk(which).arm(kind, what);
    }

    pub(super) fn get(&mut self, which: usize, block: u64) -> Option<Holding<'d>> {
        let device = self.device(which);
        let cached = device.is_cached(block);
        let (before, gets) = (self.cache.stats(), Cell::new(0));
        let had = self.had(which, block, false, || {
            gets.set(gets.get() + 1);
            device.get(block)
        })?;
        let after = self.cache.stats();
        let missed = after.misses - before.misses;
        assert_eq!((after.get - before.get, after.reads - before.reads), (gets.get(), missed));
        match had {
            Ok(guard) => {
                assert_eq!(missed, u64::from(!cached));
                let values = values(block as usize * PARTS, &guard);
                if !cached {
                    self.read_again(which, block, &values);
                }
                let now = self.states[which].model.now(block);
                assert_eq!(values, now, "block {block}, cached: {cached}");
                Some(Holding { kept: Kept::Guard(guard), which, block, values })
            }
            Err(error) => {
                assert!(!cached, "what is cached is served: {error}");
                None
            }
        }
    }

    /// What is cached is had without a wait, and nothing else.
    pub(super) fn try_get(&mut self, which: usize, block: u64) {
        let (device, model) = (self.device(which), &self.states[which].model);
        let (cached, before) = (device.is_cached(block), self.cache.stats());
        match device.try_get(block) {
            Ok(guard) => {
                assert!(cached);
                assert_eq!(values(block as usize * PARTS, &guard), model.now(block));
            }
            Err(error) => {
                assert!(!cached && error == GetError::WouldBlock, "{error}");
                assert_eq!(self.cache.stats().busy, before.busy + 1);
            }
        }
        let error = GetError::OutOfRange { block: BLOCKS, blocks: BLOCKS };
        let out = [device.get(BLOCKS).err(), device.try_get(BLOCKS).err()];
        assert_eq!(out, [Some(error); 2]);
        assert_eq!(self.cache.stats().get, before.get + 1);
    }

    /// Of a guard, with or without the guard.
    pub(super) fn pin(&mut self, arg: u8) {
        if self.kept.is_empty() {
            return;
        }
        let at = usize::from(arg >> 1) % self.kept.len();
        let Holding { kept: Kept::Guard(guard), which, block, values } = &self.kept[at] else {
            return;
        };
        let kept = Kept::Pin(guard.pin().unwrap());
        let pinned = Holding { kept, which: *which, block: *block, values: values.clone() };
        if arg & 1 == 0 {
            self.kept[at] = pinned;
        } else {
            self.keep(pinned);
        }
    }

    pub(super) fn let_go(&mut self, arg: u8) {
        if !self.kept.is_empty() {
            let holding = self.kept.swap_remove(usize::from(arg) % self.kept.len());
            holding.check();
        }
    }

    /// Whether the buffer that the block has is kept by a guard, and by a pin.
    fn users(&self, which: usize, block: u64) -> (bool, bool) {
        let Ok(there) = self.device(which).try_get(block) else { return (false, false) };
        let same = self.kept.iter().filter(|holding| holding.kept.as_ptr() == there.as_ptr());
        same.fold((false, false), |(guard, pin), holding| match holding.kept {
            Kept::Guard(_) => (true, pin),
            Kept::Pin(_) => (guard, true),
        })
    }

    pub(super) fn write(&mut self, which: usize, block: u64, how: u8) {
        let device = self.device(which);
        let (mine, pinned) = self.users(which, block);
        let (cached, newer) = (device.is_cached(block), device.is_newer(block..block + 1));
        let reads = self.cache.stats().reads;
        let (create, only_try) = (matches!(how % 8, 3 | 4 | 7), matches!(how % 8, 5 | 7));
        let limited = self.may_be_limited(which);
        // A miss that needed a buffer has woken the cleaner, which may be writing this block now.
        let may_end = cached && !pinned && !limited;
        let try_get_mut = || {
            let mut tries = 0..5_000;
            loop {
                match device.try_get_mut(block) {
                    Err(GetError::WouldBlock) if may_end && tries.next().is_some() => {
                        sleep(Duration::from_micros(100));
                    }
                    result => return result,
                }
            }
        };
        self.writing = true;
        let result = self.had(which, block, pinned, || match (create, only_try) {
            (true, true) => device.try_create(block),
            (true, false) => device.create(block),
            (false, true) => try_get_mut(),
            (false, false) => device.get_mut(block),
        });
        self.writing = false;
        let squeezed = limited || self.may_be_limited(which);
        let first = block as usize * PARTS;
        if let Some(Ok(guard)) = &result {
            if create {
                self.states[which].owed.remove(&block);
            } else if !cached {
                self.read_again(which, block, &values(first, guard));
            }
        }
        let State { model, poisoned, closed, .. } = &mut self.states[which];
        let mut guard = match result {
            Some(Ok(guard)) => guard,
            Some(Err(GetError::WouldDeadlock)) => return assert!(mine),
            Some(Err(GetError::Busy)) => {
                return assert!((pinned || self.beside.is_some()) && !only_try);
            }
            Some(Err(GetError::WouldBlock)) => {
                // Of `try_create` the cache says when that would wait.
                let is_kept = pinned || squeezed || self.beside.is_some();
                return assert!(only_try && (is_kept || !cached || create));
            }
            Some(Err(_)) | None => return,
        };
        assert!(!mine && !pinned && !*poisoned && !*closed);
        assert!(!create || self.cache.stats().reads == reads, "it is not read");
        let mut now = if create { vec![0; PARTS] } else { model.now(block) };
        assert_eq!(values(first, &guard), now, "block {block}, cached: {cached}");
        let written = match how % 8 {
            1 => 0..1,
            2 => 1..2,
            4 => 0..0, // zeros
            6 => {
                // Looked at, and not changed.
                drop(guard);
                return assert!(newer || !device.is_newer(block..block + 1), "it dirties nothing");
            }
            _ => 0..PARTS,
        };
        for part in written {
            now[part] = model.fresh();
            guard[part * SECTOR..][..SECTOR].copy_from_slice(&stamp(first + part, now[part]));
        }
        model.write(block, &now);
    }

    /// A flush, or a sync: whether it did what it was asked for.
    fn written(
        &mut self,
        which: usize,
        (durably, is_own): (bool, bool),
        mut f: impl FnMut() -> Result<(), WriteError>,
    ) -> bool {
        let disk = self.disk(which);
        let before = disk.failures(Operation::Write);
        // A block that an operation beside this has marked stays marked.
        let waits = |machine: &Self, error: &WriteError| {
            matches!(error, WriteError::Busy { .. }) && machine.beside.is_none()
        };
        let result = self.patiently(&mut f, waits);
        let failures = disk.failures(Operation::Write);
        let state = &mut self.states[which];
        assert_eq!(matches!(result, Err(WriteError::Closed)), state.closed, "{result:?}");
        let told = state.told;
        if is_own && !matches!(result, Err(WriteError::Busy { .. })) {
            state.told = failures; // the handle has heard of them, unless the call was refused
        }
        let done = match result {
            Ok(()) => true,
            Err(WriteError::Earlier { .. }) => {
                // The cleaner may fail between a call and the count behind it: then `told` has that failure, and
                // the handle has not heard of it.
                let told = if disk.has_cleaner_failed() { 0 } else { told };
                assert!(failures > told, "nothing has failed since");
                true
            }
            Err(WriteError::Io { .. } | WriteError::Panicked { .. }) => {
                assert!(failures > before, "{result:?}, and nothing has failed");
                false
            }
            Err(WriteError::Poisoned { .. }) if !state.poisoned => {
                assert!(durably && failures > before, "poisoned by nothing");
                state.poisoned = true;
                return false;
            }
            Err(WriteError::Busy { .. } | WriteError::Poisoned { .. } | WriteError::Closed) => {
                false
            }
            Err(error) => panic!("{error}"),
        };
        let poisoned = matches!(result, Err(WriteError::Poisoned { .. }));
        assert!(state.closed || poisoned == state.poisoned, "a failed sync is told: {result:?}");
        done
    }

    /// What was done is on the device, and durable if it was to be.
    fn is_on_device(&mut self, which: usize, blocks: Range<u64>, durable: bool) {
        let (disk, state) = (self.disk(which), &mut self.states[which]);
        for block in blocks {
            let is_there = disk.values(block) == state.model.now(block);
            let changes = self.beside.as_ref().is_some_and(|beside| beside.changes(which, block));
            assert!(is_there || changes, "block {block}, written back");
            if durable {
                state.model.promise(block);
            }
        }
    }

    pub(super) fn flush(&mut self, which: usize) {
        let (device, is_task) = (self.device(which), self.is_task);
        if self.written(which, (false, true), || match is_task {
            true => block_on(device.flush_async()),
            false => device.flush(),
        }) && !self.reverted(which)
        {
            self.is_on_device(which, 0..BLOCKS, false);
        }
    }

    pub(super) fn sync(&mut self, which: usize) {
        let (device, is_task) = (self.device(which), self.is_task);
        if self.written(which, (false, true), || match is_task {
            true => block_on(device.sync_async()),
            false => device.sync(),
        }) {
            self.is_on_device(which, 0..BLOCKS, true);
        }
    }

    pub(super) fn write_through(&mut self, which: usize, blocks: Range<u64>) {
        let (device, is_task) = (self.device(which), self.is_task);
        if self.written(which, (true, true), || match is_task {
            true => block_on(device.write_through_async(blocks.clone())),
            false => device.write_through(blocks.clone()),
        }) {
            self.is_on_device(which, blocks, true);
        }
    }

    /// Or, of one that is closed, another handle of the device.
    pub(super) fn close(&mut self, which: usize) {
        if self.states[which].closed {
            let told = self.disk(which).failures(Operation::Write);
            let state = &mut self.states[which];
            if state.life + 1 < LIVES {
                (state.life, state.closed, state.told) = (state.life + 1, false, told);
                attach(self.cache, &self.places[which], state.life);
            }
            return;
        }
        let (device, is_task) = (self.device(which), self.is_task);
        let mut closed = false;
        let done = self.written(which, (false, false), || {
            let result = match is_task {
                true => block_on(device.close_async()),
                false => device.close(),
            };
            closed = result.is_ok();
            result
        });
        if done {
            self.is_on_device(which, 0..BLOCKS, true);
        }
        self.states[which].closed = closed;
    }

    pub(super) fn discard(&mut self, which: usize, blocks: Range<u64>) {
        let (device, is_task) = (self.device(which), self.is_task);
        let zeros = vec![0; blocks.clone().count() * PARTS];
        let wipe = self.begin_wipe(which, blocks.clone(), zeros, Operation::Discard);
        self.wipe(&wipe, || match is_task {
            true => block_on(device.discard_async(blocks.clone())),
            false => device.discard(blocks.clone()),
        });
    }

    pub(super) fn zero(&mut self, which: usize, blocks: Range<u64>) {
        let (device, is_task) = (self.device(which), self.is_task);
        let zeros = vec![0; blocks.clone().count() * PARTS];
        let wipe = self.begin_wipe(which, blocks.clone(), zeros, Operation::Zero);
        self.wipe(&wipe, || match is_task {
            true => block_on(device.zero_async(blocks.clone())),
            false => device.zero(blocks.clone()),
        });
    }

    /// Values that no sector had, for those blocks, and their bytes.
    pub(super) fn fresh(&mut self, which: usize, blocks: &Range<u64>) -> (Vec<u32>, Vec<u8>) {
        let sectors = blocks.start as usize * PARTS..blocks.end as usize * PARTS;
        let model = &mut self.states[which].model;
        let values: Vec<_> = sectors.clone().map(|_| model.fresh()).collect();
        let stamps = sectors.zip(&values).flat_map(|(sector, value)| stamp(sector, *value));
        let bytes = stamps.collect();
        (values, bytes)
    }

    pub(super) fn write_around(&mut self, which: usize, blocks: Range<u64>) {
        let device = self.device(which);
        let (values, bytes) = self.fresh(which, &blocks);
        let disk = self.disk(which);
        let wipe = self.begin_wipe(which, blocks.clone(), values, Operation::Write);
        self.wipe(&wipe, || write_past(device, disk, &blocks, &bytes));
    }

    /// Notes that the device is about to put those values there, past the cache.
    pub(super) fn begin_wipe(
        &mut self,
        which: usize,
        blocks: Range<u64>,
        values: Vec<u32>,
        how: Operation,
    ) -> Wipe {
        let before = self.disk(which).failures(how);
        let State { model, poisoned, closed, .. } = &mut self.states[which];
        let open = !*poisoned && !*closed;
        let wipe = Wipe { which, blocks, values, how, before, open };
        if open {
            wipe.each().for_each(|(block, values)| model.may_become(block, values));
        }
        wipe
    }

    /// The device is to put those values there, past the cache.
    fn wipe(&mut self, wipe: &Wipe, f: impl FnMut() -> Result<(), WriteError>) {
        let busy = |_: &Self, error: &WriteError| matches!(error, WriteError::Busy { .. });
        let result = self.patiently(f, busy);
        self.end_wipe(wipe, result);
    }

    /// What has become of the blocks.
    pub(super) fn end_wipe(&mut self, wipe: &Wipe, result: Result<(), WriteError>) {
        let &Wipe { which, how, before, open, .. } = wipe;
        let (disk, device) = (self.disk(which), self.device(which));
        let reverted = self.reverted(which);
        let is_beside = self.beside.is_some();
        let State { model, poisoned, closed, owed, .. } = &mut self.states[which];
        match result {
            Ok(()) => {
                assert!(open, "a device that is refused");
                for (block, values) in wipe.each() {
                    model.became(block, values);
                    owed.remove(&block);
                    assert!(!device.is_cached(block), "block {block} is forgotten");
                    let is_there = reverted || disk.values(block) == model.now(block);
                    assert!(is_there, "block {block}");
                }
                return;
            }
            Err(WriteError::Io { .. } | WriteError::Panicked { .. }) => {
                assert!(disk.failures(how) > before);
            }
            Err(WriteError::Poisoned { .. }) => assert!(*poisoned),
            Err(WriteError::Closed) => assert!(*closed),
            // A block is marked for longer than the cache waits.
            Err(WriteError::Busy { .. }) => assert!(is_beside),
            Err(error) => panic!("{error}"),
        }
        if !open {
            return;
        }
        for (block, wanted) in wipe.each() {
            let there = match device.try_get(block) {
                Ok(guard) => super::values(block as usize * PARTS, &guard),
                Err(_) => disk.values(block),
            };
            let is_older = |((there, now), wanted)| there != now && there != wanted;
            if reverted && there.iter().zip(&model.now(block)).zip(wanted).any(is_older) {
                model.forgotten(block, &there);
            }
            model.perhaps_became(block, wanted, &there);
        }
    }

    pub(super) fn invalidate(&mut self, which: usize, block: u64) {
        let device = self.device(which);
        let cached = device.is_cached(block);
        let busy = |_: &Self, error: &GetError| *error == GetError::Busy;
        let result = self.patiently(|| device.invalidate(block), busy);
        if result == Err(GetError::Busy) && self.beside.is_some() {
            return;
        }
        assert_eq!(result, Ok(cached));
        assert!(!device.is_cached(block));
        if cached {
            let there = self.disk(which).values(block);
            self.states[which].model.forgotten(block, &there);
            self.states[which].owed.remove(&block);
        }
    }

    pub(super) fn reset(&mut self, which: usize) {
        let device = self.device(which);
        let is_newer = |block| device.is_newer(block..block + 1);
        let was_newer: Vec<_> = (0..BLOCKS).map(is_newer).collect();
        let busy = |_: &Self, error: &WriteError| matches!(error, WriteError::Busy { .. });
        let lost = match self.patiently(|| device.reset(), busy) {
            Err(WriteError::Busy { .. }) if self.beside.is_some() => return,
            lost => lost.unwrap(),
        };
        let (reverted, disk) = (self.reverted(which), self.disk(which));
        let state = &mut self.states[which];
        assert!(state.poisoned || lost.is_empty());
        if !state.poisoned {
            return;
        }
        state.poisoned = false;
        state.reverts = disk.reverts();
        for block in lost.blocks().iter().cloned().flatten() {
            // What was read from the device again is forgotten, unless it was modified then. The cleaner may
            // write it from the end of the reset on.
            let modified = device.is_cached(block);
            let is_kept = is_newer(block) || disk.values(block) == state.model.now(block);
            let is_kept = was_newer[block as usize] && is_kept;
            assert!(!modified || is_kept, "block {block} is lost");
            if reverted && !modified {
                state.model.forgotten(block, &disk.values(block));
            }
            state.model.lost(block);
            state.owed.remove(&block);
        }
        assert!(state.owed.is_empty(), "older bytes count as written: {:?}", state.owed);
    }

    /// What is kept is what it was, and nothing is lost.
    pub(super) fn look_around(&self, seed: u64) {
        self.kept.iter().for_each(Holding::check);
        for (which, state) in self.states.iter().enumerate() {
            let (disk, device) = (self.disk(which), self.device(which));
            for block in 0..BLOCKS {
                // What is not cached is on the device, unless that has given it up.
                if self.beside.as_ref().is_some_and(|beside| beside.changes(which, block)) {
                    continue;
                }
                let lost = !self.reverted(which)
                    && !device.is_cached(block)
                    && disk.values(block) != state.model.now(block);
                assert!(!lost, "block {block} of {which} is neither here nor there");
            }
            state.model.check_power_cut(disk, seed);
        }
    }

    /// Lets everything go; then nothing is wrong any more, unless the devices are to be `dropped` as they
    /// are.
    pub(super) fn end(mut self, dropped: bool) -> [State; 2] {
        self.end_beside();
        self.look_around(0);
        self.kept.drain(..).for_each(|holding| holding.check());
        (0..2).for_each(|which| self.disk(which).device.heal());
        if !dropped {
            for which in 0..2 {
                // A device that has given up writes says so at the next sync.
                for _ in 0..3 {
                    self.reset(which);
                    self.sync(which);
                }
            }
            for which in 0..2 {
                if self.states[which].closed {
                    continue;
                }
                // Every buffer is of use again.
                let all: Vec<_> = (0..self.limit as u64).map(|at| self.get(which, at)).collect();
                assert!(all.iter().all(Option::is_some));
                drop(all);
                self.close(which);
                assert!(self.states[which].closed);
            }
            assert_eq!(self.cache.stats().dirty, 0);
        }
        self.look_around(1);
        self.states
    }
}

/// Writes blocks past the cache: by the cache, or by the caller where that needs no wait.
pub(super) fn write_past(
    device: &Device,
    disk: &Disk,
    blocks: &Range<u64>,
    bytes: &[u8],
) -> Result<(), WriteError> {
    let by_caller = bytes[4].is_multiple_of(2); // the first value
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
