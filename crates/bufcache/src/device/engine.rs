//! A file that is read by the engine of the thread that asks.
//!
//! # Who waits for whom
//!
//! A thread that waits for a load turns its own engine meanwhile: another thread may wait for what is in
//! that engine, which nobody else reaps. A load that ends wakes the engines of those who wait for it.
//! So loads that are crossed end, whatever plugs their threads hold: a wait submits first.

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use aio_reap::{Engine, IoBuf, IoBufMut};

use super::{BlockDevice, FileDevice};
use crate::cache::Load;

/// A file or block device, as [`FileDevice`], whose reads go through the [`Engine`] that the thread has
/// [lent](lend_engine): a miss in a task does not block the thread, and readahead is in flight at once.
///
/// Threads without one read it by system calls. What is in a thread's engine ends when that thread waits
/// for a block, or turns its engine: as with all of an engine, it should do so soon.
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

/// Lets this thread read [`EngineDevice`]s by the engine, until the guard drops.
///
/// Calls that read then turn the engine, and so run the callbacks of whatever completes, as the
/// engine's own calls do.
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
pub(crate) fn wait_by_engine(mut done: impl FnMut(&mut Context<'_>) -> bool) {
    let Some(local) = local() else { return };
    let wait = poll_fn(|context| if done(context) { Poll::Ready(()) } else { Poll::Pending });
    let _ = local.engine.block_on(wait);
}

/// Lets this thread's engine go on, if it has one.
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

impl BlockDevice for EngineDevice {
    fn len(&self) -> u64 {
        self.plain.len()
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
        let begun = request.callback(|result, Target(load)| load.finish(result));
        begun.map_err(|refused| refused.into_request().into_buf().0)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.plain.write(offset, buf)
    }

    fn write_durable(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.plain.write_durable(offset, buf)
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
