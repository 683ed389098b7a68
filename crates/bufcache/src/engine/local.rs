//! The engines of a thread: the one that a program lends, and the one that the thread keeps for its writes.
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
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use aio_reap::Engine;

/// What a thread reads by.
pub(crate) struct Local {
    pub(crate) engine: Rc<Engine>,
    /// The files of devices, as the engine knows them.
    files: RefCell<Vec<(Weak<File>, aio_reap::File)>>,
    /// Operations of caches that the engine has.
    pub(crate) in_flight: Rc<Cell<usize>>,
}

impl Local {
    fn new(engine: Rc<Engine>) -> Rc<Self> {
        Rc::new(Self { engine, files: RefCell::default(), in_flight: Rc::default() })
    }

    /// Counts an operation. Returns the count, for its end.
    pub(crate) fn count(&self) -> Rc<Cell<usize>> {
        self.in_flight.set(self.in_flight.get() + 1);
        Rc::clone(&self.in_flight)
    }

    pub(crate) fn file(&self, of: &Arc<File>) -> io::Result<aio_reap::File> {
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
pub(crate) fn lent_engine() -> Option<Rc<Local>> {
    LOCAL.try_with(|local| local.borrow().clone()).ok().flatten()
}

/// The thread's engine, if it reads blocks of a cache: another thread may wait for these, or this one.
fn reading() -> Option<Rc<Local>> {
    lent_engine().filter(|local| local.in_flight.get() > 0)
}

thread_local! {
    /// The engine that this thread keeps for the writes that it waits for; `None` where there can be none.
    ///
    /// They do not use the lent engine: a thread need not have one, and its slots may be taken by the program's
    /// requests, whose completions no wait inside the cache delivers.
    static FOR_WRITES: OnceCell<Option<Rc<Local>>> = const { OnceCell::new() };
}

pub(crate) fn write_engine() -> Option<Rc<Local>> {
    let new = || {
        let engine = Engine::new().ok()?;
        mem::forget(engine.plug()); // only waits submit, all that was begun at once
        Some(Local::new(Rc::new(engine)))
    };
    FOR_WRITES.try_with(|own| own.get_or_init(new).clone()).ok().flatten()
}

/// Lets this thread read [`EngineDevice`](crate::EngineDevice)s by the engine, until the guard drops.
///
/// A call that waits turns the engine only if the engine has operations of a cache, and then delivers only these.
/// No callback of the program runs inside a call of the cache, and no task is woken by a completion of the
/// program's: they wait for the thread's next own turn of the engine. The call submits what is pending, also behind
/// a [`Plug`](aio_reap::Plug). If the program's requests leave no slot, a thread of the cache does the work.
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
    let _ = local.engine.block_on_inner(wait);
}

/// Lets this thread's engine go on. Returns whether it has operations of a cache.
#[cfg_attr(any(offlock_loom, offlock_shuttle), expect(dead_code, reason = "`lent` is in a model"))]
pub(crate) fn turn_engine() -> bool {
    let reading = reading();
    reading.iter().for_each(|local| _ = local.engine.turn_inner());
    reading.is_some()
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
