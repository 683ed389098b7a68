//! A file that is read by the engine of the thread that asks.
//!
//! # Who waits for whom
//!
//! A thread that waits for a load turns its own engine meanwhile: another thread may wait for what is in
//! that engine, which nobody else reaps. A load that ends wakes the engines of those who wait for it.
//! So loads that are crossed end, whatever plugs their threads hold: a wait submits first.

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::fs::File;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use aio_reap::{BufList, Engine, IoBuf, IoBufMut, Operation};

use super::{BlockDevice, DeviceWrite, FileDevice};
use crate::cache::Load;

/// A file or block device, as [`FileDevice`], whose reads go through the [`Engine`] that the thread has
/// [lent](lend_engine): a miss in a task does not block the thread, and readahead is in flight at once.
///
/// Threads without one read it by system calls. Dirty blocks are written many at once, by an engine that the
/// writing thread keeps for that; durable writes, and syncs, are system calls.
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
}

/// What a thread reads by.
struct Local {
    engine: Rc<Engine>,
    /// The files of devices, as the engine knows them.
    files: RefCell<Vec<(Weak<File>, aio_reap::File)>>,
}

impl Local {
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

/// The engine that this thread keeps for batches of writes; `None` where there can be none.
///
/// A batch does not use the lent engine, because waiting turns the engine and runs its callbacks. The blocks of
/// a batch are marked until it ends: a callback that asks for one of them would wait for its own thread.
fn write_engine() -> Option<Rc<Local>> {
    thread_local! {
        static OWN: OnceCell<Option<Rc<Local>>> = const { OnceCell::new() };
    }
    let new = || {
        let engine = Rc::new(Engine::new().ok()?);
        Some(Rc::new(Local { engine, files: RefCell::default() }))
    };
    OWN.try_with(|own| own.get_or_init(new).clone()).ok().flatten()
}

/// Lets this thread read [`EngineDevice`]s by the engine, until the guard drops.
///
/// Calls that read then turn the engine, and so run the callbacks of whatever completes, as the
/// engine's own calls do. A callback that asks to write the block that such a call waits for is
/// told [`GetError::Busy`](crate::GetError::Busy), after as long as the cache waits.
pub fn lend_engine(engine: &Rc<Engine>) -> LentEngine {
    let new = Rc::new(Local { engine: Rc::clone(engine), files: RefCell::default() });
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
    let Some(local) = local() else { return };
    let wait = poll_fn(|context| if done(context) { Poll::Ready(()) } else { Poll::Pending });
    let _ = local.engine.block_on(wait);
}

/// Lets this thread's engine go on, if it has one.
#[cfg_attr(any(offlock_loom, offlock_shuttle), expect(dead_code, reason = "`lent` is in a model"))]
pub(crate) fn turn_engine() {
    if let Some(local) = local() {
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

/// Bytes of a batch, which stay where they are until the batch is over.
#[derive(Clone, Copy)]
struct Part {
    at: *const u8,
    len: usize,
}

// SAFETY: the bytes are initialised, and neither change nor go before `Begun` is dropped, which waits
// for every operation that has one.
unsafe impl IoBuf for Part {
    fn as_ptr(&self) -> *const u8 {
        self.at
    }

    fn len(&self) -> usize {
        self.len
    }
}

/// The operations of a batch, each with the number of its write. Dropping it waits for them.
struct Begun<'e> {
    engine: &'e Engine,
    operations: Vec<(usize, Operation<BufList<Part>>)>,
}

impl Begun<'_> {
    /// Waits for the operations and tells the result of each.
    fn end(&mut self, mut tell: impl FnMut(usize, io::Result<()>)) {
        while let Some((_, operation)) = self.operations.last() {
            // An operation leaves the list once it is done: one that is dropped earlier goes on, with the
            // bytes of a frame that is another block's by then.
            if !operation.is_done() {
                // The kernel refuses to wait where a descriptor of the engine was closed from outside. It may
                // have the bytes all the same.
                if self.engine.wait(None).is_err() {
                    thread::sleep(Duration::from_millis(1));
                }
                continue;
            }
            if let Some((number, operation)) = self.operations.pop() {
                let result = operation.wait().0;
                tell(number, result.map(drop).map_err(io::Error::from));
            }
        }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.end(|_, _| {});
    }
}

impl EngineDevice {
    /// Begins one write of a batch.
    fn begin_write(
        &self,
        local: &Local,
        write: &DeviceWrite<'_>,
    ) -> Option<Operation<BufList<Part>>> {
        let file = local.file(&self.file).ok()?;
        let parts = write.parts().iter();
        let parts = parts.map(|part| Part { at: part.as_ptr(), len: part.len() }).collect();
        let list = BufList::new(parts).ok()?;
        local.engine.write_vectored(&file, list, write.offset()).submit().ok()
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

    fn begins_reads(&self) -> bool {
        local().is_some()
    }

    fn begin_read(&self, load: Load) -> Result<(), Load> {
        let Some(local) = local() else { return Err(load) };
        let Ok(file) = local.file(&self.file) else { return Err(load) };
        let offset = load.offset();
        let request = local.engine.read(&file, Target(load), offset);
        let begun =
            request.callback(|result, Target(load)| load.finish(result.map_err(Into::into)));
        begun.map(drop).map_err(|refused| refused.into_request().into_buf().0)
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

    fn write_batch(&self, writes: &mut [DeviceWrite<'_>], durable: bool) {
        let engine = if durable || writes.len() < 2 { None } else { write_engine() };
        let Some(local) = engine else { return self.plain.write_batch(writes, durable) };
        let operations = Vec::with_capacity(writes.len());
        let mut begun = Begun { engine: &local.engine, operations };
        {
            let _together = local.engine.plug();
            for (number, write) in writes.iter().enumerate() {
                if let Some(operation) = self.begin_write(&local, write) {
                    begun.operations.push((number, operation));
                }
            }
        }
        let mut is_over = vec![false; writes.len()];
        begun.end(|number, result| {
            is_over[number] = true;
            writes[number].end(result);
        });
        // What the engine had no room for.
        for (write, _) in writes.iter_mut().zip(is_over).filter(|(_, is_over)| !is_over) {
            write.end(self.plain.write_vectored(write.offset(), write.parts()));
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
