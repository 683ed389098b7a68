//! The operations of a file by the engine that the thread has lent. Without one, and for an operation for which
//! a thread blocks, they are deferred to system calls.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use aio_reap::{AllocateMode, BufList, IoBuf, IoBufMut, Reply, Request, RequestError, SharedFile};

use crate::cache::{Change, DeviceChange, Load};
use crate::engine::lent_engine;

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

/// Submits a request. Its completion calls `end` with `change` and the result of the device. If the engine
/// refuses the request, defers the change.
fn submit<B: 'static, R: Reply<B> + 'static>(
    request: Request<'_, B, R>,
    change: DeviceChange,
    end: impl FnOnce(DeviceChange, io::Result<()>) + 'static,
) {
    let counted = change.enter_engine();
    // Shared with the callback, because the engine drops the callback of a refused request.
    let slot = Rc::new(Cell::new(Some(change)));
    let done = {
        let slot = Rc::clone(&slot);
        move |result: Result<R, RequestError>, _| {
            drop(counted); // before the operation ends, because it keeps the device
            let Some(change) = slot.take() else { return };
            end(change, result.map(drop).map_err(io::Error::from));
        }
    };
    if request.callback_on_turn(done).is_err() {
        slot.take().into_iter().for_each(DeviceChange::defer);
    }
}

/// One part of a write.
#[derive(Clone, Copy)]
struct WriteBuf {
    at: *const u8,
    len: usize,
}

// SAFETY: the bytes are initialised, and neither change nor are freed before the `DeviceChange`
// ends. The callback of the request owns the `DeviceChange`.
unsafe impl IoBuf for WriteBuf {
    fn as_ptr(&self) -> *const u8 {
        self.at
    }

    fn len(&self) -> usize {
        self.len
    }
}

pub(super) fn read(file: &SharedFile, load: Load) {
    let engine = lent_engine().filter(|_| !load.is_blocking());
    let Some(engine) = engine else { return load.defer() };
    let file = engine.attach_shared(file);
    let (offset, counted) = (load.offset(), load.enter_engine());
    let request = engine.read(&file, LoadBuf(load), offset);
    let done = move |result: Result<usize, RequestError>, LoadBuf(load)| {
        drop(counted);
        load.finish(result.map_err(Into::into));
    };
    if let Err(refused) = request.callback_on_turn(done) {
        refused.into_request().into_buf().0.defer();
    }
}

pub(super) fn begin(shared: &SharedFile, change: DeviceChange) {
    let engine = lent_engine().filter(|_| !change.is_blocking());
    let Some(engine) = engine else { return change.defer() };
    let attach = || engine.attach_shared(shared);
    let (mode, offset, len) = match change.change() {
        // Writes of files that hang leave half of the slots to reads, whatever their number.
        Change::Write { .. } if !engine.is_half_free() => return change.defer(),
        Change::Write { offset, parts, durable } => {
            let parts = parts.iter().map(|part| WriteBuf { at: part.as_ptr(), len: part.len() });
            let Ok(list) = BufList::new(parts.collect()) else { return change.defer() };
            let file = attach();
            let request = engine.write_vectored(&file, list, offset);
            // A weak reference, because the callback lies in the engine, which ends with its last
            // owner.
            let sync_by = Rc::downgrade(&engine);
            // Only a durable write keeps the file: the others close it before they report their end.
            let file = durable.then_some(file);
            return submit(request, change, move |write, result| {
                let Some(file) = file.filter(|_| result.is_ok()) else {
                    return write.finish(result);
                };
                let Some(engine) = sync_by.upgrade() else { return write.defer() };
                submit(engine.fdatasync(&file), write, DeviceChange::finish);
            });
        }
        Change::Sync => {
            return submit(engine.fdatasync(&attach()), change, DeviceChange::finish);
        }
        Change::Discard { offset, len } => (AllocateMode::PunchHole, offset, len),
        Change::Zero { offset, len } => (AllocateMode::ZeroRange, offset, len),
    };
    submit(engine.allocate(&attach(), mode, offset, len), change, DeviceChange::finish);
}
