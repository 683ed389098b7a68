//! An entry without a cache around it: the locks of a cache are fences for a checker, which hide
//! what is missing elsewhere.

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

/// A block that is there, and its bytes.
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
    /// An entry that may be read.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for models")]
    pub fn new() -> Self {
        let bare = Self::loading();
        bare.load(7);
        bare
    }

    /// One whose block is being loaded.
    #[must_use]
    pub fn loading() -> Self {
        let bare = Self::empty();
        assert!(bare.entry.take(Self::key(), EntryWord::loading(Frame(0))));
        bare
    }

    /// Ends the load with these bytes.
    pub fn load(&self, bytes: u64) {
        // SAFETY: no other thread accesses the bytes before they are published.
        self.bytes.with_mut(|at| unsafe { at.write(bytes) });
        self.entry.publish();
    }

    /// Makes the block that is being loaded one with these bytes, as a thread does that creates it.
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

    /// Claims a load, as a miss does, and fills the buffer with what `device` has.
    pub fn claim(&self, device: impl FnOnce() -> u64) {
        assert!(self.entry.take(Self::key(), EntryWord::loading(Frame(0))));
        self.load(device());
    }

    /// Uses the place, hides its block and frees it, as the thread does that has evicted the block.
    /// `is_first` of its bucket or not.
    pub fn give_back(&self, is_first: bool) {
        // SAFETY: this thread has the place until it is free; the checker says so if not.
        self.bytes.with_mut(|at| unsafe { at.write(8) });
        self.entry.hide();
        self.entry.free(is_first);
    }

    /// Takes the place for another block, and uses it. Returns false if it is not free yet.
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

    /// As a hit does. What it read, if it was there.
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

    /// Returns what goes to the device under `BACK`, unless a thread writes the bytes.
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

    /// Reads the bytes under a pin and drops it. Uses the place if it was the last pin, as the thread
    /// does that frees the block of a failed load.
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

    /// Waits under a pin until the block is there, and returns what it reads under the pin.
    pub fn wait(&self) -> u64 {
        self.entry.pin().unwrap();
        while !self.entry.word().is_readable() {
            thread::yield_now();
        }
        self.read_and_unpin()
    }

    /// Pins the block if it is there and has not changed since the look at its word. Returns what it
    /// reads under the pin.
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
        (0..8).for_each(|_| thread::yield_now()); // it sees a schedule, not a race
        // SAFETY: the slot keeps the entry as it is.
        let bytes = self.bytes.with(|at| unsafe { at.read() });
        slot.clear();
        bytes
    }

    /// Invalidates and buries the entry. Returns whether it could be freed.
    pub fn bury(&self) -> bool {
        self.entry.change(STALE, 0);
        let left = hazard::is_left(&self.entry);
        if left {
            // SAFETY: `is_left` has found no slot that names the entry, and no reader takes it since `STALE`.
            self.bytes.with_mut(|at| unsafe { at.write(8) });
        }
        left
    }

    /// Evicts the buffer. Returns whether it could.
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
    /// The device and its operation.
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
    pub fn any(&self) -> bool {
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

/// Hits of sampled blocks, of one thread.
#[derive(Debug)]
pub struct BareSamples(Samples);

impl BareSamples {
    /// A ring for so many.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self(Samples::new(len, len).unwrap())
    }

    /// As a hit does, in the one thread that has the ring.
    pub fn add(&self, tag: u32) {
        self.0.add(0, tag);
    }

    /// As a miss does that has the lock of the shadows.
    #[must_use]
    pub fn drain(&self) -> Vec<u32> {
        let mut tags = Vec::new();
        self.0.drain(|tag| tags.push(tag));
        tags
    }
}

/// The syncs of a device that run at the same time, without the device.
#[derive(Debug)]
pub struct BareGroup(Group);

impl BareGroup {
    /// A group without a sync.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for models")]
    pub fn new() -> Self {
        Self(Group::new())
    }

    /// Whether a sync that began after this call has succeeded.
    pub fn join(&self, sync: impl FnOnce() -> bool) -> bool {
        block_on(self.0.join(self.0.losses(), async { sync() }, || ()))
    }
}

/// Syncs and durable writes of a device that tells one of them what it has lost.
pub struct BareWrites(Writes);

impl BareWrites {
    /// A device that has lost nothing.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for models")]
    pub fn new() -> Self {
        Self(Writes::new(1, AttachOptions::new()))
    }

    /// As `Shared::sync_device` does. `device` returns false if it is told of a loss.
    pub fn sync(&self, device: impl FnOnce() -> bool) -> bool {
        self.write_and_sync(|| (), device)
    }

    /// As `Shared::sync` does.
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

    /// As a look for what is newer than the device begins.
    pub fn is_poisoned(&self) -> bool {
        self.0.poisoned().is_some()
    }

    /// As `Shared::write_window` does for a durable write.
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
