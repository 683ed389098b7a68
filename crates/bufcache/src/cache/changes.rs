//! The owned completions of a device that begins writes, discards, zeroes and syncs.

use std::fmt;
use std::io::{self, IoSlice};
use std::ptr::NonNull;

use offlock_sync::Arc;

use super::completion::{Batch, Completion};
#[cfg(feature = "aio-reap")]
use crate::engine::InEngine;

/// A write of adjacent blocks: an offset on the device, and bytes that do not change before it
/// ends.
///
/// The device that [begins](crate::BlockDevice::begin_write) the write owns it and ends it once, in
/// any thread: by [`finish`](Self::finish), or by a drop, which fails it with `ECANCELED`. If it is
/// forgotten, the issuer waits for ever.
#[must_use = "a drop fails the write with `ECANCELED`: end it with `finish`"]
pub struct DeviceWrite {
    completion: Completion,
    offset: u64,
    parts: NonNull<[IoSlice<'static>]>,
    durable: bool,
}

// SAFETY: the parts are read only, and live until the write ends, see `new`.
unsafe impl Send for DeviceWrite {}
// SAFETY: a shared reference only reads the parts, which no thread changes until the write ends.
unsafe impl Sync for DeviceWrite {}

impl DeviceWrite {
    /// # Safety
    ///
    /// The parts neither change nor go, and the batch is neither moved nor forgotten, before the
    /// batch has been [waited](Batch::wait) for.
    pub(super) unsafe fn new(
        batch: &Batch<'_>,
        (number, alone): (usize, bool),
        offset: u64,
        parts: &[IoSlice<'_>],
        durable: bool,
    ) -> Self {
        // SAFETY: the caller's promise.
        let completion = unsafe { batch.begin(number, alone) };
        let parts = NonNull::slice_from_raw_parts(NonNull::from(parts).cast(), parts.len());
        Self { completion, offset, parts, durable }
    }

    /// Counts the write as one in an engine of this thread until the returned value drops.
    #[cfg(feature = "aio-reap")]
    pub(crate) fn enter_engine(&self) -> InEngine {
        self.completion.enter_engine()
    }

    /// Returns the offset on the device in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the bytes, in parts that are adjacent on the device.
    pub fn parts(&self) -> &[IoSlice<'_>] {
        // SAFETY: by the promise of `new` they live until the write ends, which takes `self`.
        unsafe { self.parts.as_ref() }
    }

    /// Returns whether the write must be durable when it ends (FUA).
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Returns whether the issuer waits for this write alone, so that another thread would not make
    /// it faster.
    pub fn is_alone(&self) -> bool {
        self.completion.alone
    }

    /// Returns whether a thread blocks until the write ends. If not, a task has begun it: the
    /// device must not wait, and must not rely on a later wait of the calling thread.
    pub fn is_blocking(&self) -> bool {
        self.completion.is_waited_for()
    }

    /// Calls the blocking [`write_vectored`](crate::BlockDevice::write_vectored) of the device, or
    /// the durable form, and ends the write: on the calling thread if a thread
    /// [blocks](Self::is_blocking) for it, otherwise on a thread of the cache.
    pub fn defer(self) {
        defer(self, |write| &write.completion, Self::call);
    }

    fn call(self) {
        let Self { completion, offset, parts, durable } = self;
        completion.call(|source| {
            // SAFETY: as in `parts`; the write ends after this call.
            let parts = unsafe { parts.as_ref() };
            match durable {
                true => source.device.write_vectored_durable(offset, parts),
                false => source.device.write_vectored(offset, parts),
            }
        });
    }

    /// Ends the write. After an error any of its sectors may have been written. `Interrupted` is an
    /// error like any other: a device that wants to retry does so first.
    pub fn finish(self, result: io::Result<()>) {
        self.completion.finish(result);
    }
}

impl fmt::Debug for DeviceWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceWrite")
            .field("offset", &self.offset)
            .field("parts", &self.parts().len())
            .field("durable", &self.durable)
            .finish_non_exhaustive()
    }
}

/// Calls the device for an operation: on this thread if a thread blocks for it, and otherwise on a
/// thread of the cache.
fn defer<T: Send + 'static>(operation: T, completion: fn(&T) -> &Completion, call: fn(T)) {
    if completion(&operation).is_waited_for() {
        return call(operation);
    }
    let Some(source) = completion(&operation).source().map(Arc::clone) else { return };
    source.cache.call_blocking(source.id, move || call(operation));
}

/// A discard or zeroing of a range, owned by the device that begins it. Ends as a [`DeviceWrite`]
/// does.
#[must_use = "a drop fails the operation with `ECANCELED`: end it with `finish`"]
pub struct DeviceRange {
    completion: Completion,
    offset: u64,
    len: u64,
    discards: bool,
}

impl DeviceRange {
    /// # Safety
    ///
    /// As for [`Batch::begin`].
    pub(super) unsafe fn new(batch: &Batch<'_>, (offset, len): (u64, u64), discards: bool) -> Self {
        // SAFETY: the caller's promise.
        Self { completion: unsafe { batch.begin(0, true) }, offset, len, discards }
    }

    /// As [`DeviceWrite::enter_engine`].
    #[cfg(feature = "aio-reap")]
    pub(crate) fn enter_engine(&self) -> InEngine {
        self.completion.enter_engine()
    }

    /// Returns the offset on the device in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is not empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether a thread blocks until the operation ends; see [`DeviceWrite::is_blocking`].
    pub fn is_blocking(&self) -> bool {
        self.completion.is_waited_for()
    }

    /// Calls the blocking [`discard`](crate::BlockDevice::discard) or
    /// [`zero`](crate::BlockDevice::zero) of the device, on a thread as [`DeviceWrite::defer`]
    /// says.
    pub fn defer(self) {
        defer(self, |range| &range.completion, Self::call);
    }

    fn call(self) {
        let Self { completion, offset, len, discards } = self;
        completion.call(|source| match discards {
            true => source.device.discard(offset, len),
            false => source.device.zero(offset, len),
        });
    }

    /// Ends the operation; with `EOPNOTSUPP` if the device cannot do it and has changed nothing.
    /// `Interrupted` is an error like any other.
    pub fn finish(self, result: io::Result<()>) {
        self.completion.finish(result);
    }
}

impl fmt::Debug for DeviceRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRange")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A sync, owned by the device that begins it. Ends as a [`DeviceWrite`] does.
#[must_use = "a drop fails the sync with `ECANCELED`: end it with `finish`"]
pub struct DeviceSync {
    completion: Completion,
}

impl DeviceSync {
    /// # Safety
    ///
    /// As for [`Batch::begin`].
    pub(super) unsafe fn new(batch: &Batch<'_>) -> Self {
        // SAFETY: the caller's promise.
        Self { completion: unsafe { batch.begin(0, true) } }
    }

    /// As [`DeviceWrite::enter_engine`].
    #[cfg(feature = "aio-reap")]
    pub(crate) fn enter_engine(&self) -> InEngine {
        self.completion.enter_engine()
    }

    /// Returns whether a thread blocks until the sync ends; see [`DeviceWrite::is_blocking`].
    pub fn is_blocking(&self) -> bool {
        self.completion.is_waited_for()
    }

    /// Calls the blocking [`sync`](crate::BlockDevice::sync) of the device, on a thread as
    /// [`DeviceWrite::defer`] says.
    pub fn defer(self) {
        defer(self, |sync| &sync.completion, Self::call);
    }

    fn call(self) {
        self.completion.call(|source| source.device.sync());
    }

    /// Ends the sync. After an error, writes that were not durable before may be lost. That holds
    /// for `Interrupted`, too: a device that wants to retry does so first.
    pub fn finish(self, result: io::Result<()>) {
        self.completion.finish(result);
    }
}

impl fmt::Debug for DeviceSync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSync").finish_non_exhaustive()
    }
}
