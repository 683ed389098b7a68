//! The guards by which users read and write buffers.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::cache::Protected;
use crate::error::GetError;
use crate::frames::Frame;
use crate::handle::Device;
use crate::hazard::Slot;
use crate::word::VALID;

/// A shared reference to a buffer, which is not written or evicted while the guard lives.
///
/// The guard cannot be sent to another thread; a [`Pin`], from [`pin`](Self::pin), can. A guard
/// that is forgotten ([`mem::forget`](std::mem::forget)) keeps the buffer for ever.
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
    pub(crate) fn new(device: &'d Device, Protected { slot, frame }: Protected) -> Self {
        Self { device, slot, bytes: device.shared.frames.bytes(frame) }
    }

    /// Returns a pin on the buffer, which may be sent to another thread. Costs one write to shared
    /// memory.
    ///
    /// In a cache with several block sizes a pin on a small buffer also holds its
    /// [chunk](crate::Builder::block_sizes): no large block gets that memory.
    ///
    /// # Errors
    ///
    /// [`GetError::TooManyPins`] if the buffer has 65,535 pins.
    pub fn pin(&self) -> Result<Pin, GetError> {
        let entry = self.slot.entry();
        // SAFETY: the slot of this guard names an entry of the cache's table, which lives as long
        // as `device`.
        let entry = unsafe { entry.as_ref() };
        entry.pin_and_read_on()?;
        let word = entry.word();
        debug_assert!(word.has(VALID));
        let place = self.device.shared.frames.header(word.frame()).place();
        Ok(Pin { device: self.device.clone(), place, bytes: self.bytes })
    }
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        // SAFETY: the slot keeps the buffer from eviction and from writers, so its bytes are
        // read-only (invariant 1 of `frames`).
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

/// A shared reference to a buffer that may be sent to another thread. From [`ReadGuard::pin`].
#[must_use = "the buffer is kept only while the pin lives"]
pub struct Pin {
    pub(crate) device: Device,
    pub(crate) place: u32,
    pub(crate) bytes: NonNull<[u8]>,
}

// SAFETY: the pin is a count in the entry, not bound to a thread, and keeps the bytes read-only.
// The other fields are `Send`.
unsafe impl Send for Pin {}
// SAFETY: a shared reference only reads the bytes, which no thread writes while the pin exists.
unsafe impl Sync for Pin {}

impl Deref for Pin {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pin keeps the buffer from eviction and from writers, so its bytes are
        // read-only (invariant 1 of `frames`).
        unsafe { self.bytes.as_ref() }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let shared = &self.device.shared;
        // The bytes of a load that is not over were not read through this pin.
        if cfg!(offlock_loom) && shared.has_ended(self.place) {
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

/// An exclusive reference to a buffer, which this thread alone reads and writes. Other threads
/// wait.
///
/// A changed buffer becomes dirty when the guard drops. It is written to the device later: by the
/// cleaner, by a [`sync`](Device::sync), or because its memory is needed. A guard that drops in a
/// panic does the same, and the changes up to the panic stay.
///
/// The guard cannot be sent to another thread. A guard that is forgotten keeps the buffer for ever,
/// and each sync waits for it as long as the cache waits.
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
    pub(crate) fn new(device: &'d Device, Protected { slot, frame }: Protected) -> Self {
        let bytes = device.shared.frames.bytes(frame);
        Self { device, slot, frame, bytes, modified: false }
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        let buffer = Protected { slot: self.slot, frame: self.frame };
        let shared = &self.device.shared;
        shared.frames.writing(self.frame);
        shared.unlock_write(&self.device.source, buffer, self.modified);
    }
}

/// An exclusive reference to a buffer that may be sent to another thread: a [`WriteGuard`] for
/// tasks.
///
/// From [`Device::get_mut_async`]. A thread that holds it and waits for the same block is not
/// detected, so that wait ends with [`GetError::Busy`] rather than [`GetError::WouldDeadlock`].
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

// SAFETY: the mark on the entry belongs to the guard, not to a thread, and the guard owns the bytes
// as a `Box` does.
unsafe impl Send for OwnedWriteGuard {}
// SAFETY: a shared reference only reads the bytes, and the mark keeps writers out.
unsafe impl Sync for OwnedWriteGuard {}

impl OwnedWriteGuard {
    pub(crate) fn new(device: Device, Protected { slot, frame }: Protected) -> Self {
        let bytes = device.shared.frames.bytes(frame);
        slot.clear(); // the mark keeps the buffer
        Self { device, frame, bytes, modified: false }
    }
}

impl Drop for OwnedWriteGuard {
    fn drop(&mut self) {
        let shared = &self.device.shared;
        shared.frames.writing(self.frame);
        shared.end_write(&self.device.source, self.frame, self.modified);
    }
}

/// The methods that both exclusive guards have.
macro_rules! exclusive {
    ($guard:ident $(<$life:lifetime>)?) => {
        impl $guard $(<$life>)? {
            /// Keeps the block from being written until the [log](crate::Wal) is durable up to
            /// `lsn`, or up to a larger position set before. Counts as a change.
            ///
            /// # Panics
            ///
            /// Panics if the device was attached without a [log](crate::AttachOptions::wal): the block
            /// would be written before the log entry that describes it.
            #[track_caller]
            pub fn set_lsn(&mut self, lsn: u64) {
                let has_log = self.device.source.writes.options.wal.is_some();
                assert!(has_log, "set_lsn needs AttachOptions::wal");
                self.modified = true;
                self.device.shared.frames.header(self.frame).raise_lsn(lsn);
            }
        }

        impl Deref for $guard $(<$life>)? {
            type Target = [u8];

            fn deref(&self) -> &[u8] {
                // SAFETY: the guard's mark excludes writers and other readers (invariant 1 of
                // `frames`).
                unsafe { self.bytes.as_ref() }
            }
        }

        impl DerefMut for $guard $(<$life>)? {
            fn deref_mut(&mut self) -> &mut [u8] {
                self.modified = true;
                // SAFETY: the guard's mark excludes other users of the bytes (invariant 1 of
                // `frames`), and `&mut self` excludes other references through this guard.
                unsafe { self.bytes.as_mut() }
            }
        }

        impl fmt::Debug for $guard $(<$life>)? {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($guard))
                    .field("len", &self.len())
                    .field("modified", &self.modified)
                    .finish_non_exhaustive()
            }
        }
    };
}

exclusive!(WriteGuard<'_>);
exclusive!(OwnedWriteGuard);
