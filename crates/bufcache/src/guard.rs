//! Buffers in the hands of users.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::cache::Held;
use crate::error::GetError;
use crate::frames::Frame;
use crate::handle::Device;
use crate::hazard::Slot;
use crate::word::VALID;

/// A buffer that is read: it is not written, evicted or given to another block while this lives.
///
/// It belongs to its thread: [`pin`](Self::pin) makes one that does not. A forgotten one
/// ([`mem::forget`](std::mem::forget)) keeps the buffer for ever.
///
/// ```compile_fail
/// fn sends<T: Send>() {}
/// sends::<bufcache::ReadGuard<'static>>();
/// ```
#[must_use = "the buffer is kept only while the guard lives"]
pub struct ReadGuard<'d> {
    device: &'d Device,
    slot: &'static Slot,
    bytes: NonNull<[u8]>,
}

impl<'d> ReadGuard<'d> {
    #[inline(always)]
    pub(crate) fn new(device: &'d Device, Held { slot, frame }: Held) -> Self {
        Self { device, slot, bytes: device.shared.frames.bytes(frame) }
    }

    /// A pin on the buffer that may go to another thread. One shared write.
    ///
    /// # Errors
    ///
    /// [`GetError::TooManyPins`].
    pub fn pin(&self) -> Result<Pin, GetError> {
        let entry = self.slot.entry();
        // SAFETY: the slot is this guard's and names an entry of the device's table, which lives as
        // long as the device.
        let entry = unsafe { entry.as_ref() };
        entry.pin_and_read_on()?;
        let word = entry.word();
        debug_assert!(word.has(VALID));
        let place = self.device.shared.frames.header(word.frame()).place();
        Ok(Pin { device: self.device.clone(), place, bytes: self.bytes })
    }
}

impl ReadGuard<'_> {
    /// Lets the buffer survive so many passes of whoever looks for one to evict: 0 if it was not set.
    /// What one buffer leads to (the root of a tree) may weigh more than what leads nowhere. A miss that finds
    /// no lighter buffer in a whole pass takes more than one off each weight in its next passes.
    ///
    /// Takes the lock of misses. A buffer that is evicted loses it.
    pub fn set_weight(&self, weight: u8) {
        // SAFETY: as in `pin`.
        let entry = unsafe { self.slot.entry().as_ref() };
        self.device.shared.set_weight(entry.word().frame(), weight);
    }
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        // SAFETY: the slot keeps the buffer from being taken apart, so its bytes are read only
        // (invariant 1 of `frames`).
        unsafe { self.bytes.as_ref() }
    }
}

impl Drop for ReadGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.device.shared.frames.reading_at(self.bytes);
        self.slot.clear();
    }
}

impl fmt::Debug for ReadGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadGuard").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A buffer that is kept from eviction, from any thread. From [`ReadGuard::pin`].
#[must_use = "the buffer is kept only while the pin lives"]
pub struct Pin {
    pub(crate) device: Device,
    pub(crate) place: u32,
    pub(crate) bytes: NonNull<[u8]>,
}

// SAFETY: it reaches bytes that are read only while the pin is there, and what is shared anyway.
unsafe impl Send for Pin {}
// SAFETY: a shared reference only reads the bytes, which no thread changes while the pin is there.
unsafe impl Sync for Pin {}

impl Deref for Pin {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: a pinned buffer is not taken apart, so its bytes are read only.
        unsafe { self.bytes.as_ref() }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let shared = &self.device.shared;
        // Of a load that is not over nobody has looked at the bytes.
        if cfg!(offlock_loom) && shared.is_over(self.place) {
            shared.frames.reading_at(self.bytes);
        }
        shared.unpin_place(self.place);
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A buffer that this thread alone writes; others wait for it.
///
/// What is written becomes dirty when the guard drops, and is given to the device later, by the cleaner,
/// by a [`sync`](Device::sync), or because its memory is needed. A guard that drops while its thread
/// panics does the same: what was written by then stays written.
///
/// It belongs to its thread. A forgotten one keeps the buffer, and every sync waits for it as long as
/// the cache waits.
///
/// ```compile_fail
/// fn sends<T: Send>() {}
/// sends::<bufcache::WriteGuard<'static>>();
/// ```
#[must_use = "the buffer is the thread's only while the guard lives"]
pub struct WriteGuard<'d> {
    device: &'d Device,
    slot: &'static Slot,
    frame: Frame,
    bytes: NonNull<[u8]>,
    modified: bool,
}

impl<'d> WriteGuard<'d> {
    pub(crate) fn new(device: &'d Device, Held { slot, frame }: Held) -> Self {
        let bytes = device.shared.frames.bytes(frame);
        Self { device, slot, frame, bytes, modified: false }
    }

    /// Lets the block be written only once the [log](crate::Wal) is durable up to that number, or to a
    /// larger one that was set before. Counts as a change.
    pub fn set_lsn(&mut self, lsn: u64) {
        self.modified = true;
        self.device.shared.frames.header(self.frame).raise_lsn(lsn);
    }

    /// Keeps the block from being written to the device until what this returns drops: it can be read and
    /// written in the cache meanwhile. Counts as a change.
    pub fn hold_back(&mut self) -> Hold {
        self.modified = true;
        Hold::new(self.device, self.frame)
    }
}

impl Deref for WriteGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the buffer is this guard's alone (invariant 1 of `frames`).
        unsafe { self.bytes.as_ref() }
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.modified = true;
        // SAFETY: the guard's mark excludes other users of the bytes, and `&mut self` other uses of the guard.
        unsafe { self.bytes.as_mut() }
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        let held = Held { slot: self.slot, frame: self.frame };
        let shared = &self.device.shared;
        shared.frames.writing(self.frame);
        shared.unlock_write(&self.device.source, held, self.modified);
    }
}

impl fmt::Debug for WriteGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteGuard")
            .field("len", &self.len())
            .field("modified", &self.modified)
            .finish_non_exhaustive()
    }
}

/// A buffer that its holder alone writes, in any thread: a [`WriteGuard`] for tasks, from
/// [`Device::get_mut_async`]. Unlike that, it does not know the thread that would wait for itself: such a wait
/// ends with [`GetError::Busy`].
///
/// ```
/// fn sends<T: Send>() {}
/// sends::<bufcache::OwnedWriteGuard>();
/// ```
#[must_use = "the buffer is the holder's only while the guard lives"]
pub struct OwnedWriteGuard {
    device: Device,
    frame: Frame,
    bytes: NonNull<[u8]>,
    modified: bool,
}

// SAFETY: the mark on the entry belongs to the guard, not to a thread, and the bytes are reached through `&mut` as
// those of a `Box` are.
unsafe impl Send for OwnedWriteGuard {}
// SAFETY: a shared reference only reads the bytes, and the mark keeps other threads from them.
unsafe impl Sync for OwnedWriteGuard {}

impl OwnedWriteGuard {
    pub(crate) fn new(device: Device, Held { slot, frame }: Held) -> Self {
        let bytes = device.shared.frames.bytes(frame);
        slot.clear(); // the mark keeps the buffer
        Self { device, frame, bytes, modified: false }
    }

    /// As [`WriteGuard::set_lsn`].
    pub fn set_lsn(&mut self, lsn: u64) {
        self.modified = true;
        self.device.shared.frames.header(self.frame).raise_lsn(lsn);
    }

    /// As [`WriteGuard::hold_back`].
    ///
    /// ```
    /// use bufcache::{Cache, MemoryDevice};
    /// # use testkit::block_on;
    ///
    /// let disk = Cache::new(1 << 20)?.attach(MemoryDevice::new(vec![0; 100_000]), 4096)?;
    /// # block_on(async {
    /// let mut block = disk.get_mut_async(3).await?;
    /// block[..5].copy_from_slice(b"hello");
    /// let hold = block.hold_back(); // until the entry of a journal is durable
    /// drop(block);
    /// drop(hold);
    /// disk.sync_async().await?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn hold_back(&mut self) -> Hold {
        self.modified = true;
        Hold::new(&self.device, self.frame)
    }
}

impl Deref for OwnedWriteGuard {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the buffer is this guard's alone (invariant 1 of `frames`).
        unsafe { self.bytes.as_ref() }
    }
}

impl DerefMut for OwnedWriteGuard {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.modified = true;
        // SAFETY: the guard's mark excludes other users of the bytes, and `&mut self` other uses of the guard.
        unsafe { self.bytes.as_mut() }
    }
}

impl Drop for OwnedWriteGuard {
    fn drop(&mut self) {
        let shared = &self.device.shared;
        shared.frames.writing(self.frame);
        shared.end_write(&self.device.source, self.frame, self.modified);
    }
}

impl fmt::Debug for OwnedWriteGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedWriteGuard")
            .field("len", &self.len())
            .field("modified", &self.modified)
            .finish_non_exhaustive()
    }
}

/// Keeps a dirty block from being written. From [`WriteGuard::hold_back`] and [`OwnedWriteGuard::hold_back`].
#[must_use = "the block is held back only while this lives"]
pub struct Hold {
    device: Device,
    frame: Frame,
}

impl Hold {
    fn new(device: &Device, frame: Frame) -> Self {
        device.shared.frames.header(frame).hold();
        Self { device: device.clone(), frame }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.device.shared.frames.header(self.frame).let_go();
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}

/// A buffer that is cached for nobody: its holder's alone. From [`Device::read_uncached`].
pub struct Uncached {
    pub(crate) device: Device,
    pub(crate) frame: Frame,
}

impl Deref for Uncached {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the frame is this buffer's alone (invariant 1 of `frames`).
        unsafe { self.device.shared.frames.bytes(self.frame).as_ref() }
    }
}

impl DerefMut for Uncached {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed alone.
        unsafe { self.device.shared.frames.bytes(self.frame).as_mut() }
    }
}

impl Drop for Uncached {
    fn drop(&mut self) {
        self.device.shared.frames.writing(self.frame);
        self.device.shared.give(self.frame);
    }
}

impl fmt::Debug for Uncached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uncached").field("len", &self.len()).finish_non_exhaustive()
    }
}
