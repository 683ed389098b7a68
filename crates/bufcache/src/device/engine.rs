//! A device on a file whose operations run on I/O engines.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, IoSlice};
use std::rc::Rc;

use aio_reap::{AllocateMode, BufList, IoBuf, IoBufMut, Reply, Request, RequestError, SharedFile};

use super::{BlockDevice, FileDevice};
use crate::cache::{DeviceRange, DeviceSync, DeviceWrite, Load};
use crate::engine::{InEngine, lent_engine};

/// A file or block device, as [`FileDevice`]. Readahead, and the operations that tasks begin, use
/// the [`Engine`](aio_reap::Engine) that the thread has [lent](crate::lend_engine): they block no
/// thread, and many are in flight at once.
///
/// Without a lent engine, threads of the cache make these operations by system calls. A call that
/// blocks makes its operations by system calls, too.
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
        let engine = lent_engine().filter(|_| !range.is_blocking());
        let Some(engine) = engine else { return range.defer() };
        let file = engine.attach_shared(&self.file);
        let request = engine.allocate(&file, mode, range.offset(), range.len());
        let counted = range.enter_engine();
        let begun = begin(counted, request, range, |range, result| match result {
            Some(result) => range.finish(result),
            None => range.defer(),
        });
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

/// Submits a request. Its completion calls `end` with `operation` and the result of the device, or
/// `None` if the engine has ended, which is no error of the device. If the engine refuses the request,
/// returns the operation.
fn begin<B: 'static, R: Reply<B> + 'static, T: 'static>(
    counted: InEngine,
    request: Request<'_, B, R>,
    operation: T,
    end: impl FnOnce(T, Option<io::Result<()>>) + 'static,
) -> Result<(), T> {
    // Shared with the callback, because the engine drops the callback of a refused request.
    let slot = Rc::new(Cell::new(Some(operation)));
    let done = {
        let slot = Rc::clone(&slot);
        move |result: Result<R, RequestError>, _| {
            drop(counted); // before the operation ends, because it keeps the device
            let Some(operation) = slot.take() else { return };
            end(
                operation,
                match result {
                    Err(error) if error.errno() == libc::ECANCELED => None,
                    result => Some(result.map(drop).map_err(io::Error::from)),
                },
            );
        }
    };
    match request.callback_on_turn(done) {
        Ok(_) => Ok(()),
        Err(_) => slot.take().map_or(Ok(()), Err),
    }
}

fn end_write(write: DeviceWrite, result: Option<io::Result<()>>) {
    match result {
        Some(result) => write.finish(result),
        None => write.defer(),
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
        let engine = lent_engine().filter(|_| !load.is_blocking());
        let Some(engine) = engine else { return load.defer() };
        let file = engine.attach_shared(&self.file);
        let (offset, counted) = (load.offset(), load.enter_engine());
        let request = engine.read(&file, LoadBuf(load), offset);
        let done = move |result: Result<usize, RequestError>, LoadBuf(load)| {
            drop(counted);
            match result {
                // The engine has ended, which is no error of the device.
                Err(error) if error.errno() == libc::ECANCELED => load.defer(),
                result => load.finish(result.map_err(Into::into)),
            }
        };
        if let Err(refused) = request.callback_on_turn(done) {
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
        let engine = lent_engine().filter(|_| !write.is_blocking());
        let Some(engine) = engine else { return write.defer() };
        let file = engine.attach_shared(&self.file);
        let parts = write.parts().iter();
        let parts = parts.map(|part| WriteBuf { at: part.as_ptr(), len: part.len() }).collect();
        let Ok(list) = BufList::new(parts) else { return write.defer() };
        let request = engine.write_vectored(&file, list, write.offset());
        // A weak reference, because the callback lies in the engine, which ends with its last
        // owner.
        let sync_by = Rc::downgrade(&engine);
        // Only a durable write keeps the file: the others close it before they report their end.
        let file = write.is_durable().then_some(file);
        let counted = write.enter_engine();
        let begun = begin(counted, request, write, move |write, result| {
            let file = file.filter(|_| matches!(result, Some(Ok(()))));
            let Some(file) = file else { return end_write(write, result) };
            let Some(engine) = sync_by.upgrade() else { return write.defer() };
            let (sync, counted) = (engine.fdatasync(&file), write.enter_engine());
            let begun = begin(counted, sync, write, end_write);
            begun.err().into_iter().for_each(DeviceWrite::defer);
        });
        begun.err().into_iter().for_each(DeviceWrite::defer);
    }

    /// The kernel makes an engine's writes, discards and zeroes of a file on the page cache one
    /// after the other. So a write-back waits once for those before it if it begins all writes at a
    /// time, and no write of the disk is among them that could delay a read.
    fn write_depth(&self) -> usize {
        if self.plain.is_on_page_cache() { 256 } else { self.plain.write_depth() }
    }

    fn begin_discard(&self, range: DeviceRange) {
        self.begin_range(range, AllocateMode::PunchHole);
    }

    fn begin_zero(&self, range: DeviceRange) {
        self.begin_range(range, AllocateMode::ZeroRange);
    }

    fn begin_sync(&self, sync: DeviceSync) {
        let engine = lent_engine().filter(|_| !sync.is_blocking());
        let Some(engine) = engine else { return sync.defer() };
        let file = engine.attach_shared(&self.file);
        let (request, counted) = (engine.fdatasync(&file), sync.enter_engine());
        let begun = begin(counted, request, sync, |sync, result| match result {
            Some(result) => sync.finish(result),
            None => sync.defer(),
        });
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
