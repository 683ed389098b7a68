//! A file whose operations are begun by engines.
//!
//! # Loads that are crossed
//!
//! A thread that waits for a load turns its own engine meanwhile, if that has loads: another thread may wait for
//! these, and no other thread reaps them. A load that ends wakes the engines of the threads that wait for it.
//! So loads that are crossed end, whatever plugs their threads hold: a wait submits first.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::fs::File;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::marker::PhantomData;
use std::mem;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use aio_reap::{BufList, Engine, IoBuf, IoBufMut, RequestError};

use super::{BlockDevice, FileDevice};
use crate::cache::{DeviceWrite, Load};

/// A file or block device, as [`FileDevice`], which tasks and readahead read by the [`Engine`] that their thread
/// has [lent](lend_engine): a miss does not block the thread, and many reads are in flight at once.
///
/// Without a lent engine the cache's own threads read it for tasks. A thread that waits for a block reads it by a
/// system call. Dirty blocks are written many at once, by an engine that the writing thread keeps for that;
/// durable writes, and syncs, are system calls.
///
/// What is in a thread's engine ends when that thread waits for a block, or turns its engine: as with all
/// of an engine, it should do so soon.
#[derive(Debug)]
pub struct EngineDevice {
    file: Arc<File>,
    plain: FileDevice,
}

impl EngineDevice {
    /// The file as large as it is now.
    ///
    /// # Errors
    ///
    /// As [`FileDevice::new`], and where no second descriptor can be had.
    pub fn new(file: File) -> io::Result<Self> {
        Ok(Self { file: Arc::new(file.try_clone()?), plain: FileDevice::new(file)? })
    }

    /// Without what lies behind so many bytes, as [`FileDevice::up_to`].
    pub fn up_to(mut self, len: u64) -> Self {
        self.plain = self.plain.up_to(len);
        self
    }
}

/// What a thread reads by.
struct Local {
    engine: Rc<Engine>,
    /// The files of devices, as the engine knows them.
    files: RefCell<Vec<(Weak<File>, aio_reap::File)>>,
    /// Operations of caches that the engine has.
    in_flight: Rc<Cell<usize>>,
}

impl Local {
    fn new(engine: Rc<Engine>) -> Rc<Self> {
        Rc::new(Self { engine, files: RefCell::default(), in_flight: Rc::default() })
    }

    /// Counts an operation. Returns the count, for its end.
    fn count(&self) -> Rc<Cell<usize>> {
        self.in_flight.set(self.in_flight.get() + 1);
        Rc::clone(&self.in_flight)
    }

    fn file(&self, of: &Arc<File>) -> io::Result<aio_reap::File> {
        let mut files = self.files.borrow_mut();
        let weak = Arc::downgrade(of);
        if let Some((_, file)) = files.iter().find(|(known, _)| known.ptr_eq(&weak)) {
            return Ok(file.clone());
        }
        files.retain(|(known, _)| known.strong_count() > 0);
        let file = self.engine.attach(of.try_clone()?)?;
        files.push((weak, file.clone()));
        Ok(file)
    }
}

thread_local! {
    static LOCAL: RefCell<Option<Rc<Local>>> = const { RefCell::new(None) };
}

/// The thread's engine; none while the thread ends.
fn local() -> Option<Rc<Local>> {
    LOCAL.try_with(|local| local.borrow().clone()).ok().flatten()
}

/// The thread's engine, if it reads blocks of a cache: another thread may wait for these, or this one.
fn reading() -> Option<Rc<Local>> {
    local().filter(|local| local.in_flight.get() > 0)
}

thread_local! {
    /// The engine that this thread keeps for the writes that it waits for; `None` where there can be none.
    ///
    /// They do not use the lent engine, because waiting turns the engine and runs its callbacks. The blocks are
    /// marked until their writes end: a callback that asks for one of them would wait for its own thread.
    static FOR_WRITES: OnceCell<Option<Rc<Local>>> = const { OnceCell::new() };
}

fn write_engine() -> Option<Rc<Local>> {
    let new = || {
        let engine = Engine::new().ok()?;
        mem::forget(engine.plug()); // only waits submit, all that was begun at once
        Some(Local::new(Rc::new(engine)))
    };
    FOR_WRITES.try_with(|own| own.get_or_init(new).clone()).ok().flatten()
}

/// Lets this thread read [`EngineDevice`]s by the engine, until the guard drops.
///
/// A call that waits for a block turns the engine only if the engine has loads of a cache. Then the callbacks of
/// other requests that have completed run inside the call; one that asks to write the block that the call waits
/// for is told [`GetError::Busy`](crate::GetError::Busy), after as long as the cache waits. So a program whose
/// callbacks must not run there uses [`get_async`](crate::Device::get_async), or reads nothing ahead.
pub fn lend_engine(engine: &Rc<Engine>) -> LentEngine {
    let new = Local::new(Rc::clone(engine));
    let before = LOCAL.with(|local| local.replace(Some(new)));
    LentEngine { before, _thread: PhantomData }
}

/// From [`lend_engine`].
#[must_use = "the engine is lent only while the guard lives"]
pub struct LentEngine {
    before: Option<Rc<Local>>,
    _thread: PhantomData<*const ()>,
}

impl Drop for LentEngine {
    fn drop(&mut self) {
        let before = self.before.take();
        // What it replaces may be the last handle of the engine: not dropped under the borrow.
        let _ended = LOCAL.try_with(|local| local.replace(before));
    }
}

impl fmt::Debug for LentEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentEngine").finish_non_exhaustive()
    }
}

/// Turns this thread's engine until `done`, which it tells a waker that is to be called then. Returns
/// at once where the thread has no engine, or the kernel refuses to wait.
#[cfg_attr(any(offlock_loom, offlock_shuttle), expect(dead_code, reason = "`lent` is in a model"))]
pub(crate) fn wait_by_engine(mut done: impl FnMut(&mut Context<'_>) -> bool) {
    let Some(local) = reading() else { return };
    let wait = poll_fn(|context| if done(context) { Poll::Ready(()) } else { Poll::Pending });
    let _ = local.engine.block_on(wait);
}

/// Lets this thread's engine go on, if it has one.
#[cfg_attr(any(offlock_loom, offlock_shuttle), expect(dead_code, reason = "`lent` is in a model"))]
pub(crate) fn turn_engine() {
    if let Some(local) = reading() {
        local.engine.turn();
    }
}

/// A load in the engine's hands.
struct Target(Load);

// SAFETY: the bytes are a frame's, which does not move with the load, is initialised, and is the
// load's alone until it ends.
unsafe impl IoBuf for Target {
    fn as_ptr(&self) -> *const u8 {
        <[u8]>::as_ptr(&self.0)
    }

    fn len(&self) -> usize {
        <[u8]>::len(&self.0)
    }
}

// SAFETY: as above; the same address.
unsafe impl IoBufMut for Target {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        <[u8]>::as_mut_ptr(&mut self.0)
    }
}

/// Ends a write with what the engine says.
fn end(write: DeviceWrite, result: Result<usize, RequestError>) {
    match result {
        // The engine ends, which is no error of the device.
        Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => write.defer(),
        result => write.finish(result.map(drop).map_err(io::Error::from)),
    }
}

/// Waits until a write ends that is in the engine of this thread for writes. Returns false at once if none is.
#[cfg_attr(any(offlock_loom, offlock_shuttle), expect(dead_code, reason = "a model has no engine"))]
pub(crate) fn wait_for_writes() -> bool {
    let known = FOR_WRITES.try_with(|own| own.get().cloned().flatten()).ok().flatten();
    let Some(local) = known.filter(|local| local.in_flight.get() > 0) else { return false };
    // The kernel refuses to wait where a descriptor of the engine was closed from outside. It may have the bytes
    // all the same.
    if local.engine.wait(None).is_err() {
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Bytes of a write, which stay where they are until the write ends.
#[derive(Clone, Copy)]
struct Part {
    at: *const u8,
    len: usize,
}

// SAFETY: the bytes are initialised, and neither change nor go before the `DeviceWrite` ends, which the request's
// callback has.
unsafe impl IoBuf for Part {
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
        // A thread that waits anyway reads by a system call, which runs no callback of the engine's user.
        let Some(local) = local().filter(|_| !load.is_blocking()) else { return load.defer() };
        let Ok(file) = local.file(&self.file) else { return load.defer() };
        let offset = load.offset();
        let in_flight = local.count();
        let request = local.engine.read(&file, Target(load), offset);
        let begun = request.callback(move |result, Target(load)| {
            in_flight.set(in_flight.get() - 1);
            match result {
                // The engine ends, which is no error of the device.
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
        // Durable writes, and one alone, are system calls.
        let by_engine = !write.is_durable() && !write.is_alone();
        let Some(local) = by_engine.then(write_engine).flatten() else { return write.defer() };
        let Ok(file) = local.file(&self.file) else { return write.defer() };
        let parts = write.parts().iter();
        let parts = parts.map(|part| Part { at: part.as_ptr(), len: part.len() }).collect();
        let Ok(list) = BufList::new(parts) else { return write.defer() };
        let request = local.engine.write_vectored(&file, list, write.offset());
        // Kept here as well, as a refused request drops its callback.
        let write = Rc::new(Cell::new(Some(write)));
        let in_flight = local.count();
        let begun = request.callback({
            let write = Rc::clone(&write);
            move |result, _| {
                in_flight.set(in_flight.get() - 1);
                if let Some(write) = write.take() {
                    end(write, result);
                }
            }
        });
        if begun.is_err() {
            local.in_flight.set(local.in_flight.get() - 1);
            write.take().into_iter().for_each(DeviceWrite::defer);
        }
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
