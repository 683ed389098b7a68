//! Changes of a device, as the device that begins them owns them.

use std::fmt;
use std::io::{self, IoSlice};
use std::ptr::NonNull;

use percpu::sync::Arc;

use super::completion::{Batch, Completion};

/// A write of neighbouring blocks that is to be made: its place on the device, and the bytes, which do not
/// change before it ends.
///
/// It is owned by the device that [begins](crate::BlockDevice::begin_write) it, and ends once, in any thread: by
/// [`finish`](Self::finish), or by its drop, which fails it with `ECANCELED`. A forgotten one lets the thread
/// that writes wait for ever.
#[must_use = "the blocks count as being written until this ends"]
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
    /// The parts neither change nor go, and the batch is neither moved nor forgotten, before the batch has been
    /// [waited](Batch::wait) for.
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

    /// Where it begins on the device, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The bytes, one part behind the other.
    pub fn parts(&self) -> &[IoSlice<'_>] {
        // SAFETY: by the promise of `new` they live until the write ends, which takes `self`.
        unsafe { self.parts.as_ref() }
    }

    /// Whether it must be durable when it ends (FUA).
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// Whether the thread that begins this write waits for it, and for no other, so that there is nothing to gain
    /// by writing elsewhere.
    pub fn is_alone(&self) -> bool {
        self.completion.alone
    }

    /// Whether a thread blocks until the write ends. Where none does, a task has begun it, and the device neither
    /// waits nor leaves the write to a later wait of the calling thread.
    pub fn is_blocking(&self) -> bool {
        self.completion.is_waited_for()
    }

    /// Has the device's blocking method called for it, [`write_vectored`](crate::BlockDevice::write_vectored) or the
    /// durable one: by the calling thread if one [blocks](Self::is_blocking) for the write, otherwise by a thread of
    /// the cache's.
    pub fn defer(self) {
        defer(self, |write| &write.completion, Self::call);
    }

    fn call(self) {
        let Self { completion, offset, parts, durable } = self;
        completion.call(|source| {
            // SAFETY: as in `parts`; the write ends behind this.
            let parts = unsafe { parts.as_ref() };
            match durable {
                true => source.device.write_vectored_durable(offset, parts),
                false => source.device.write_vectored(offset, parts),
            }
        });
    }

    /// Ends the write. After an error any of its sectors may have been written. `Interrupted` is an error, too: the
    /// device tries again itself, before.
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

/// A range of a device that is to be discarded or zeroed, owned by the device that begins that; it ends as a
/// [`DeviceWrite`] does.
#[must_use = "the range is kept from others until this ends"]
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

    /// Where it begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is not empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether a thread blocks until the operation ends; see [`DeviceWrite::is_blocking`].
    pub fn is_blocking(&self) -> bool {
        self.completion.is_waited_for()
    }

    /// Has the device's blocking method called for it, [`discard`](crate::BlockDevice::discard) or
    /// [`zero`](crate::BlockDevice::zero), as [`DeviceWrite::defer`] does.
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

    /// Ends the operation; with `EOPNOTSUPP` where the device cannot do it, and has done nothing. `Interrupted` is an
    /// error as any other.
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

/// A sync that is to be made, owned by the device that begins it; it ends as a [`DeviceWrite`] does.
#[must_use = "the device counts as being synced until this ends"]
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

    /// Whether a thread blocks until the sync ends; see [`DeviceWrite::is_blocking`].
    pub fn is_blocking(&self) -> bool {
        self.completion.is_waited_for()
    }

    /// Has the device's blocking [`sync`](crate::BlockDevice::sync) called for it, as [`DeviceWrite::defer`] does.
    pub fn defer(self) {
        defer(self, |sync| &sync.completion, Self::call);
    }

    fn call(self) {
        self.completion.call(|source| source.device.sync());
    }

    /// Ends the sync. After an error nothing need ever become durable that was not so before. That holds for
    /// `Interrupted`, too: the device tries again itself, before.
    pub fn finish(self, result: io::Result<()>) {
        self.completion.finish(result);
    }
}

impl fmt::Debug for DeviceSync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSync").finish_non_exhaustive()
    }
}
