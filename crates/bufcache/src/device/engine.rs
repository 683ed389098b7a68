//! A device on a file whose operations run on I/O engines.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, IoSlice};
use std::rc::Rc;

use aio_reap::{AllocateMode, BufList, IoBuf, IoBufMut, Reply, Request, RequestError, SharedFile};

use super::{BlockDevice, FileDevice};
use crate::cache::{DeviceRange, DeviceSync, DeviceWrite, Load};
use crate::engine::{ThreadEngine, lent_engine, write_engine};

/// A file or block device, as [`FileDevice`]. Readahead, and the operations that tasks begin, use
/// the [`Engine`](aio_reap::Engine) that the thread has [lent](crate::lend_engine): they block no
/// thread, and many are in flight at once.
///
/// Without a lent engine, threads of the cache make these operations by system calls. A thread that
/// waits for a block reads it by a system call. A thread that waits for a write-back to a file with
/// `O_DIRECT` submits many blocks at once to an engine that it keeps for this purpose; its other
/// writes, and its syncs, are system calls.
///
/// An operation on a thread's engine ends when that thread waits for a block or turns the engine,
/// as every request of an engine does. So the thread should turn it soon.
#[derive(Debug)]
pub struct EngineDevice {
    /// An engine refers to the file only during an operation, so no idle thread keeps a descriptor
    /// of a dropped device open.
    file: SharedFile,
    plain: FileDevice,
}

impl EngineDevice {
    /// Returns a device with the current size of the file.
    ///
    /// # Errors
    ///
    /// Those of [`FileDevice::new`]; those of `aio_reap::SharedFile::new`; and the error of the
    /// system call that duplicates the descriptor.
    pub fn new(file: File) -> io::Result<Self> {
        Ok(Self { file: SharedFile::new(file.try_clone()?)?, plain: FileDevice::new(file)? })
    }

    /// Limits the device to the first `len` bytes, like [`FileDevice::up_to`].
    pub fn up_to(mut self, len: u64) -> Self {
        self.plain = self.plain.up_to(len);
        self
    }
}

impl EngineDevice {
    fn begin_range(&self, range: DeviceRange, mode: AllocateMode) {
        let Some(local) = lent_engine().filter(|_| !range.is_blocking()) else {
            return range.defer();
        };
        let file = local.engine.attach_shared(&self.file);
        let request = local.engine.allocate(&file, mode, range.offset(), range.len());
        let begun =
            begin(&local, request, range, |range, result| end_range(range, device_result(result)));
        begun.err().into_iter().for_each(DeviceRange::defer);
    }
}

/// The buffer of a load that an engine fills.
struct LoadBuf(Load);

// SAFETY: the bytes are those of a frame. They are initialised, do not move with the load, and
// belong to the load alone until it ends.
unsafe impl IoBuf for LoadBuf {
    fn as_ptr(&self) -> *const u8 {
        <[u8]>::as_ptr(&self.0)
    }

    fn len(&self) -> usize {
        <[u8]>::len(&self.0)
    }
}

// SAFETY: as above; the same address.
unsafe impl IoBufMut for LoadBuf {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        <[u8]>::as_mut_ptr(&mut self.0)
    }
}

/// Submits a request. Its completion calls `end` with `operation` and the result. If the engine
/// refuses the request, returns the operation.
fn begin<B: 'static, R: Reply<B> + 'static, T: 'static>(
    local: &ThreadEngine,
    request: Request<'_, B, R>,
    operation: T,
    end: impl FnOnce(T, Result<R, RequestError>) + 'static,
) -> Result<(), T> {
    // Shared with the callback, because the engine drops the callback of a refused request.
    let slot = Rc::new(Cell::new(Some(operation)));
    let in_flight = local.begin_operation();
    let begun = request.inner_callback({
        let slot = Rc::clone(&slot);
        move |result, _| {
            in_flight.set(in_flight.get() - 1);
            if let Some(operation) = slot.take() {
                end(operation, result);
            }
        }
    });
    match begun {
        Ok(_) => Ok(()),
        Err(_) => {
            local.in_flight.set(local.in_flight.get() - 1);
            slot.take().map_or(Ok(()), Err)
        }
    }
}

/// Returns the result of the device. `None` if the engine has ended, which is no error of the
/// device.
fn device_result<R>(result: Result<R, RequestError>) -> Option<io::Result<()>> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => None,
        result => Some(result.map(drop).map_err(io::Error::from)),
    }
}

fn end_write(write: DeviceWrite, result: Option<io::Result<()>>) {
    match result {
        Some(result) => write.finish(result),
        None => write.defer(),
    }
}

fn end_range(range: DeviceRange, result: Option<io::Result<()>>) {
    match result {
        Some(result) => range.finish(result),
        None => range.defer(),
    }
}

fn end_sync(sync: DeviceSync, result: Option<io::Result<()>>) {
    match result {
        Some(result) => sync.finish(result),
        None => sync.defer(),
    }
}

/// One part of a write.
#[derive(Clone, Copy)]
struct WriteBuf {
    at: *const u8,
    len: usize,
}

// SAFETY: the bytes are initialised, and neither change nor are freed before the `DeviceWrite`
// ends. The callback of the request owns the `DeviceWrite`.
unsafe impl IoBuf for WriteBuf {
    fn as_ptr(&self) -> *const u8 {
        self.at
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl BlockDevice for EngineDevice {
    fn len(&self) -> u64 {
        self.plain.len()
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.plain.identity()
    }

    fn is_read_only(&self) -> bool {
        self.plain.is_read_only()
    }

    fn alignment(&self) -> usize {
        self.plain.alignment()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.plain.read(offset, buf)
    }

    fn begin_read(&self, load: Load) {
        // A thread that blocks reads by a system call: an engine would add a submission and a wait.
        let Some(local) = lent_engine().filter(|_| !load.is_blocking()) else {
            return load.defer();
        };
        let file = local.engine.attach_shared(&self.file);
        let offset = load.offset();
        let in_flight = local.begin_operation();
        let request = local.engine.read(&file, LoadBuf(load), offset);
        let begun = request.inner_callback(move |result, LoadBuf(load)| {
            in_flight.set(in_flight.get() - 1);
            match result {
                // The engine has ended, which is no error of the device.
                Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => load.defer(),
                result => load.finish(result.map_err(Into::into)),
            }
        });
        if let Err(refused) = begun.map(drop) {
            local.in_flight.set(local.in_flight.get() - 1);
            refused.into_request().into_buf().0.defer();
        }
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.plain.write(offset, buf)
    }

    fn write_durable(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.plain.write_durable(offset, buf)
    }

    fn write_vectored(&self, offset: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        self.plain.write_vectored(offset, parts)
    }

    fn write_vectored_durable(&self, offset: u64, parts: &[IoSlice<'_>]) -> io::Result<()> {
        self.plain.write_vectored_durable(offset, parts)
    }

    fn begin_write(&self, write: DeviceWrite) {
        // A thread that blocks makes a durable, single or buffered write by a system call. A
        // buffered write only copies, and if the file system cannot begin it without a wait, as
        // ext4 cannot, a ring passes each write to a kernel thread.
        let is_call = || write.is_durable() || write.is_alone() || self.alignment() == 1;
        let local = match write.is_blocking() {
            true if is_call() => None,
            true => write_engine(),
            false => lent_engine(),
        };
        let Some(local) = local else { return write.defer() };
        let file = local.engine.attach_shared(&self.file);
        let parts = write.parts().iter();
        let parts = parts.map(|part| WriteBuf { at: part.as_ptr(), len: part.len() }).collect();
        let Ok(list) = BufList::new(parts) else { return write.defer() };
        let request = local.engine.write_vectored(&file, list, write.offset());
        // A weak reference, because the callback lies in the engine, which ends with its last
        // owner.
        let sync_by = Rc::downgrade(&local);
        // Only a durable write keeps the file: the others close it before they report their end.
        let file = write.is_durable().then_some(file);
        let begun = begin(&local, request, write, move |write, result| {
            let result = device_result(result);
            let file = file.filter(|_| matches!(result, Some(Ok(()))));
            let Some(file) = file else { return end_write(write, result) };
            let Some(local) = sync_by.upgrade() else { return write.defer() };
            let sync = local.engine.fdatasync(&file);
            let end = |write, result| end_write(write, device_result(result));
            begin(&local, sync, write, end).err().into_iter().for_each(DeviceWrite::defer);
        });
        begun.err().into_iter().for_each(DeviceWrite::defer);
    }

    fn begin_discard(&self, range: DeviceRange) {
        self.begin_range(range, AllocateMode::PunchHole);
    }

    fn begin_zero(&self, range: DeviceRange) {
        self.begin_range(range, AllocateMode::ZeroRange);
    }

    fn begin_sync(&self, sync: DeviceSync) {
        let Some(local) = lent_engine().filter(|_| !sync.is_blocking()) else {
            return sync.defer();
        };
        let file = local.engine.attach_shared(&self.file);
        let request = local.engine.fdatasync(&file);
        let begun =
            begin(&local, request, sync, |sync, result| end_sync(sync, device_result(result)));
        begun.err().into_iter().for_each(DeviceSync::defer);
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.plain.zero(offset, len)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.plain.discard(offset, len)
    }

    fn sync(&self) -> io::Result<()> {
        self.plain.sync()
    }
}
