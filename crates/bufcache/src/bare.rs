//! Parts of a cache for models: an entry, an operation, the samples of a thread and the syncs of a device,
//! without the locks of a cache. For a checker these are fences, and hide a fence that is missing.

use std::convert::Infallible;

use offlock_sync::cell::UnsafeCell;
use offlock_sync::thread;

use crate::dirty::{AttachOptions, Group, Writes};
use crate::frames::Frame;
use crate::hazard;
use crate::policy::{Samples, mark};
use crate::source::InFlight;
use crate::wait::block_on;
use crate::word::{BACK, Entry, EntryWord, Key, STALE, WRITE};

/// The entry of one block, and the bytes of the block.
#[derive(Debug)]
pub struct Bare {
    entry: Entry,
    bytes: UnsafeCell<u64>,
}

// SAFETY: `bytes` is the only field that is not `Sync`. It is written by the method that has claimed
// the free entry or has taken it apart, after it found no pin and no slot; it is read behind a pin or
// a slot. A model reports an access that breaks this.
unsafe impl Sync for Bare {}

impl Bare {
    /// Returns an entry whose block may be read.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for models")]
    pub fn new() -> Self {
        let bare = Self::loading();
        bare.load(7);
        bare
    }

    /// Returns an entry whose block is being loaded.
    #[must_use]
    pub fn loading() -> Self {
        let bare = Self::empty();
        assert!(bare.entry.take(Self::key(), EntryWord::loading(Frame(0))));
        bare
    }

    /// Ends the load of the block with `bytes`.
    pub fn load(&self, bytes: u64) {
        // SAFETY: no other thread accesses the bytes before they are published.
        self.bytes.with_mut(|at| unsafe { at.write(bytes) });
        self.entry.publish();
    }

    /// Ends the load of the block by the creation of a block with `bytes`.
    pub fn create(&self, bytes: u64) {
        let slot = hazard::protect_kept(&self.entry).unwrap();
        self.entry.change(WRITE, 0);
        self.entry.publish_locked();
        // SAFETY: the mark `WRITE` keeps readers away, and the slot keeps the entry.
        self.bytes.with_mut(|at| unsafe { at.write(bytes) });
        self.entry.change(0, WRITE);
        slot.clear();
    }

    /// Returns an entry that holds no block.
    #[must_use]
    pub fn empty() -> Self {
        Self { entry: Entry::new(), bytes: UnsafeCell::new(0) }
    }

    /// Begins a load like a miss, and ends it with the bytes that `device` returns.
    pub fn claim(&self, device: impl FnOnce() -> u64) {
        assert!(self.entry.take(Self::key(), EntryWord::loading(Frame(0))));
        self.load(device());
    }

    /// Uses the entry of an evicted block, hides the block and frees the entry. `is_first` says whether
    /// the entry is the first one of its bucket.
    pub fn give_back(&self, is_first: bool) {
        // SAFETY: this thread has the entry until it is free; the checker says so if not.
        self.bytes.with_mut(|at| unsafe { at.write(8) });
        self.entry.hide();
        self.entry.free(is_first);
    }

    /// Takes the entry for another block, and uses it. Returns false if the entry is not free yet.
    pub fn take_over(&self) -> bool {
        let taken = self.entry.take(Key::new(1, 8), EntryWord::loading(Frame(1)));
        if taken {
            // SAFETY: as in `give_back`.
            self.bytes.with_mut(|at| unsafe { at.write(9) });
        }
        taken
    }

    fn key() -> Key {
        Key::new(1, 0)
    }

    /// Reads the bytes under a hazard slot like a hit. Returns `None` if the block may not be read.
    pub fn read(&self) -> Option<u64> {
        let slot = hazard::protect(&self.entry).ok()?;
        let there = self.entry.look(Self::key()).is_some_and(EntryWord::is_readable);
        // SAFETY: the slot keeps the entry as it is.
        let bytes = there.then(|| self.bytes.with(|at| unsafe { at.read() }));
        slot.clear();
        bytes
    }

    /// Writes the bytes under `WRITE`, unless the block is being written to the device.
    pub fn write(&self, bytes: u64) {
        let seen = self.entry.word();
        if !seen.has(BACK) && self.entry.try_change(seen, WRITE, 0).is_ok() {
            // SAFETY: the mark keeps other threads away.
            self.bytes.with_mut(|at| unsafe { at.write(bytes) });
            self.entry.change(0, WRITE);
        }
    }

    /// Returns the bytes that a write-back gives the device under `BACK`, unless a thread writes them.
    pub fn write_back(&self) -> Option<u64> {
        let seen = self.entry.word();
        let marked = !seen.has(WRITE) && self.entry.try_change(seen, BACK, 0).is_ok();
        marked.then(|| {
            // SAFETY: the mark keeps writers away.
            let bytes = self.bytes.with(|at| unsafe { at.read() });
            self.entry.change(0, BACK);
            bytes
        })
    }

    /// Reads the bytes under a pin and drops the pin. After the last pin it uses the entry, like the
    /// thread that frees the block of a failed load.
    pub fn leave(&self) {
        // SAFETY: the pin keeps the entry as it is.
        self.bytes.with(|at| unsafe { at.read() });
        if self.entry.unpin().pins() == 0 {
            // SAFETY: the other pins are dropped.
            self.bytes.with_mut(|at| unsafe { at.write(8) });
        }
    }

    /// Protects the block by both slots of a record. Returns false if a slot cannot be had.
    pub fn protect_twice(&self) -> bool {
        let slots = [(); 2].map(|()| hazard::protect(&self.entry));
        slots.iter().flatten().for_each(|slot| slot.clear());
        slots.iter().all(Result::is_ok)
    }

    /// Pins the entry, as a thread that waits for a load does.
    pub fn pin(&self) {
        assert!(self.entry.try_pin(self.entry.word()).is_ok());
    }

    /// Waits under a pin until the block may be read, and returns the bytes.
    pub fn wait(&self) -> u64 {
        self.entry.pin().unwrap();
        while !self.entry.word().is_readable() {
            thread::yield_now();
        }
        self.read_and_unpin()
    }

    /// Pins the block if it may be read and has not changed since the look at its word. Returns the
    /// bytes.
    pub fn pin_and_read(&self) -> Option<u64> {
        let seen = self.entry.word();
        let pinned = seen.is_readable() && self.entry.try_pin(seen).is_ok();
        pinned.then(|| self.read_and_unpin())
    }

    fn read_and_unpin(&self) -> u64 {
        // SAFETY: the pin keeps the entry as it is.
        let bytes = self.bytes.with(|at| unsafe { at.read() });
        self.entry.unpin();
        bytes
    }

    /// Turns a waiter's pin into a hazard slot and returns the bytes read under it.
    pub fn wake(&self) -> u64 {
        let slot = hazard::protect_kept(&self.entry).unwrap();
        self.entry.unpin();
        #[cfg(offlock_shuttle)]
        (0..8).for_each(|_| thread::yield_now()); // shuttle sees a schedule, not a race
        // SAFETY: the slot keeps the entry as it is.
        let bytes = self.bytes.with(|at| unsafe { at.read() });
        slot.clear();
        bytes
    }

    /// Invalidates the entry. Returns whether it could be freed.
    pub fn invalidate(&self) -> bool {
        self.entry.change(STALE, 0);
        let left = hazard::is_left(&self.entry);
        if left {
            // SAFETY: `is_left` has found no slot that names the entry, and no reader takes it since `STALE`.
            self.bytes.with_mut(|at| unsafe { at.write(8) });
        }
        left
    }

    /// Evicts the block. Returns false if a slot protects it.
    pub fn evict(&self) -> bool {
        if !mark(&self.entry) {
            return false;
        }
        let mut protected = [false];
        hazard::mark_protected(&[&self.entry], &mut protected);
        if protected == [false] {
            // SAFETY: the scan has found no slot that names the entry, and no reader takes it since the mark.
            self.bytes.with_mut(|at| unsafe { at.write(8) });
        }
        protected == [false]
    }
}

/// A device with one operation in flight, and the block that it writes.
#[derive(Debug)]
pub struct BareOperation {
    in_flight: InFlight,
    entry: Entry,
}

impl BareOperation {
    /// Returns a device whose operation is in flight.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for models")]
    pub fn new() -> Self {
        let (in_flight, entry) = (InFlight::new(), Entry::new());
        assert!(in_flight.begin());
        entry.change(BACK, 0);
        Self { in_flight, entry }
    }

    /// Ends the operation. Returns whether the caller detaches the device.
    #[must_use]
    pub fn end(&self) -> bool {
        self.in_flight.end()
    }

    /// Ends the device. Returns whether the caller detaches it.
    #[must_use]
    pub fn refuse(&self) -> bool {
        self.in_flight.refuse()
    }

    /// Returns whether the operation is in flight.
    #[must_use]
    pub fn is_in_flight(&self) -> bool {
        self.in_flight.any()
    }

    /// Fails the write. Returns whether the caller drops the block.
    #[must_use]
    pub fn fail(&self) -> bool {
        self.entry.change(0, BACK);
        self.in_flight.is_abandoned()
    }

    /// Drops the last handle. Returns whether the caller drops the block.
    #[must_use]
    pub fn abandon(&self) -> bool {
        self.in_flight.abandon();
        !self.entry.word().has(BACK)
    }
}

/// The ring of one thread for its hits of sampled blocks.
#[derive(Debug)]
pub struct BareSamples(Samples);

impl BareSamples {
    /// Returns a ring for `len` hits.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self(Samples::new(len, len).unwrap())
    }

    /// Notes a hit, in the thread of the ring.
    pub fn add(&self, tag: u32) {
        self.0.add(0, tag);
    }

    /// Takes the hits like a miss that has the lock of the shadows.
    #[must_use]
    pub fn drain(&self) -> Vec<u32> {
        let mut tags = Vec::new();
        self.0.drain(|tag| tags.push(tag));
        tags
    }
}

/// The group commit of a device.
#[derive(Debug)]
pub struct BareGroup(Group);

impl BareGroup {
    /// Returns a group in which no sync runs.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for models")]
    pub fn new() -> Self {
        Self(Group::new())
    }

    /// Returns whether a sync that began after this call has succeeded.
    pub fn join(&self, sync: impl FnOnce() -> bool) -> bool {
        block_on(self.0.join(self.0.losses(), async { sync() }, || ()))
    }
}

/// The syncs and durable writes of a device that reports lost writes once.
pub struct BareWrites(Writes);

impl BareWrites {
    /// Returns a device that has lost nothing.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for models")]
    pub fn new() -> Self {
        Self(Writes::new(1, AttachOptions::new()))
    }

    /// Syncs like `Shared::sync_device`. `device` returns false to report a loss.
    pub fn sync(&self, device: impl FnOnce() -> bool) -> bool {
        self.write_and_sync(|| (), device)
    }

    /// Writes and syncs like `Shared::sync`.
    pub fn write_and_sync(&self, write: impl FnOnce(), device: impl FnOnce() -> bool) -> bool {
        let losses = self.0.group.losses();
        write();
        let sync = async { self.0.poisoned().is_none() && self.has_succeeded(device) };
        block_on(self.0.group.join(losses, sync, || ()))
    }

    /// Resets the device like `Shared::reset`. Calls `look` until no loss is reported meanwhile.
    pub fn reset(&self, mut look: impl FnMut()) {
        _ = self.0.forgive_after(|| Ok::<(), Infallible>(look()));
    }

    /// Returns whether a sync has failed since the last reset.
    pub fn is_poisoned(&self) -> bool {
        self.0.poisoned().is_some()
    }

    /// Writes like `Shared::write_window` for a durable write. `device` returns false to report a loss.
    pub fn write_durable(&self, device: impl FnOnce() -> bool) -> bool {
        let writing = self.0.group.begin_write();
        let has_succeeded = self.has_succeeded(device);
        block_on(writing.end()) && has_succeeded
    }

    fn has_succeeded(&self, device: impl FnOnce() -> bool) -> bool {
        let has_succeeded = device();
        if !has_succeeded {
            self.0.poison(libc::EIO);
        }
        has_succeeded
    }
}

impl std::fmt::Debug for BareWrites {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BareWrites").finish_non_exhaustive()
    }
}
