//! The engines of a thread: those that the program lends, and one that the thread keeps for its
//! write-backs.
//!
//! # Crossed loads
//!
//! Two threads may each wait for a load on the engine of the other, which only that other thread
//! reaps. So a thread that waits for a load turns its own engine meanwhile, if the engine has
//! operations of a cache, and the end of a load wakes the engines of the threads that wait for it.
//! A turn submits first, even behind a plug.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::mem;
use std::ptr;
use std::rc::{self, Rc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use aio_reap::Engine;

/// An engine of this thread, and the number of its operations.
pub(crate) struct ThreadEngine {
    pub(crate) engine: Rc<Engine>,
    /// The number of operations of caches on the engine.
    pub(crate) in_flight: Rc<Cell<usize>>,
}

impl ThreadEngine {
    fn new(engine: Rc<Engine>, in_flight: Rc<Cell<usize>>) -> Rc<Self> {
        Rc::new(Self { engine, in_flight })
    }

    /// Returns this thread's record of an engine, or a new one if the engine is not lent now. A new
    /// record goes on with the count of an inactive engine.
    fn for_engine(engine: &Rc<Engine>) -> Rc<Self> {
        let lent = LENT.with_borrow(|lent| {
            let mut lent = lent.iter().map(|(_, local)| local);
            lent.find(|local| Rc::ptr_eq(&local.engine, engine)).cloned()
        });
        if let Some(local) = lent {
            return local;
        }
        let in_flight = INACTIVE.with_borrow(|known| {
            let same = known.iter().find(|(other, _)| ptr::eq(other.as_ptr(), Rc::as_ptr(engine)));
            same.map(|(_, in_flight)| Rc::clone(in_flight))
        });
        Self::new(Rc::clone(engine), in_flight.unwrap_or_default())
    }

    /// Adds the engine to `INACTIVE` if it has operations, so that waits still turn it.
    fn note_inactive(&self) {
        let _ended = INACTIVE.try_with(|known| {
            let mut known = known.borrow_mut();
            known.retain(|(other, in_flight)| {
                let is_other = !ptr::eq(other.as_ptr(), Rc::as_ptr(&self.engine));
                is_other && other.strong_count() > 0 && in_flight.get() > 0
            });
            if self.in_flight.get() > 0 {
                known.push((Rc::downgrade(&self.engine), Rc::clone(&self.in_flight)));
            }
        });
    }

    /// Counts an operation. Returns the counter, which the end of the operation lowers.
    pub(crate) fn begin_operation(&self) -> Rc<Cell<usize>> {
        self.in_flight.set(self.in_flight.get() + 1);
        Rc::clone(&self.in_flight)
    }
}

type Inactive = (rc::Weak<Engine>, Rc<Cell<usize>>);

thread_local! {
    /// The lent engines with the numbers of their guards, ascending. The thread uses the last.
    static LENT: RefCell<Vec<(u64, Rc<ThreadEngine>)>> = const { RefCell::new(Vec::new()) };
    /// Engines that were in use, with the numbers of their operations. One may be in use again.
    static INACTIVE: RefCell<Vec<Inactive>> = const { RefCell::new(Vec::new()) };
}

/// Returns the first engine in `INACTIVE` from index `at` on that is not in use and has operations
/// of a cache, and the index after it.
fn next_busy_inactive(at: usize) -> Option<(usize, Rc<Engine>)> {
    let lent = lent_engine();
    let is_lent =
        |engine: &Rc<Engine>| lent.as_ref().is_some_and(|local| Rc::ptr_eq(&local.engine, engine));
    let find = |known: &RefCell<Vec<Inactive>>| {
        let known = known.borrow();
        known.iter().enumerate().skip(at).find_map(|(at, (engine, in_flight))| {
            let engine = engine.upgrade().filter(|engine| in_flight.get() > 0 && !is_lent(engine));
            engine.map(|engine| (at + 1, engine))
        })
    };
    INACTIVE.try_with(find).ok().flatten()
}

/// Returns the lent engine that this thread uses. `None` without one, and while the thread ends.
pub(crate) fn lent_engine() -> Option<Rc<ThreadEngine>> {
    LENT.try_with(|lent| lent.borrow().last().map(|(_, local)| Rc::clone(local))).ok().flatten()
}

/// Returns the lent engine that this thread uses, if it has operations of a cache.
fn busy_engine() -> Option<Rc<ThreadEngine>> {
    lent_engine().filter(|local| local.in_flight.get() > 0)
}

thread_local! {
    /// The engine for the writes that this thread waits for. `None` if the system refused one.
    ///
    /// Not the lent engine: there may be none, and its slots may be full of requests of the
    /// program, whose completions no wait inside the cache delivers.
    static WRITE_ENGINE: OnceCell<Option<Rc<ThreadEngine>>> = const { OnceCell::new() };
}

/// Returns the engine for the writes that this thread waits for, which the first call makes.
pub(crate) fn write_engine() -> Option<Rc<ThreadEngine>> {
    let new = || {
        let engine = Engine::new().ok()?;
        mem::forget(engine.plug()); // only a wait submits, and all pending requests at once
        Some(ThreadEngine::new(Rc::new(engine), Rc::default()))
    };
    WRITE_ENGINE.try_with(|own| own.get_or_init(new).clone()).ok().flatten()
}

/// Makes [`EngineDevice`](crate::EngineDevice)s use the engine for readahead, and for operations
/// that tasks begin on this thread, until the guard drops. Of several lent engines, the thread uses
/// the one that was lent last. The guards may drop in any order.
///
/// A call of the cache that waits turns the engine if the engine has operations of a cache, and
/// delivers the completions of these only. Completions of the program's own requests wait for the
/// next turn by the program: inside a call of the cache they run no callback and wake no task. The
/// turn submits all pending requests, even behind a [`Plug`](aio_reap::Plug). The same holds for an
/// engine that was lent before, until its operations of caches have ended. If the requests of the
/// program leave no slot, a thread of the cache makes the operation.
pub fn lend_engine(engine: &Rc<Engine>) -> LentEngine {
    let new = ThreadEngine::for_engine(engine);
    let before = lent_engine();
    let number = LENT.with_borrow_mut(|lent| {
        let number = lent.last().map_or(0, |(number, _)| number + 1);
        lent.push((number, new));
        number
    });
    before.iter().for_each(|before| before.note_inactive());
    LentEngine { number, _thread: PhantomData }
}

/// The guard of an engine that is lent to this thread's calls of the cache, from [`lend_engine`].
#[must_use = "the engine is lent only while the guard lives"]
pub struct LentEngine {
    number: u64,
    _thread: PhantomData<*const ()>,
}

impl Drop for LentEngine {
    fn drop(&mut self) {
        // Perhaps the last handle of the engine, so it is not dropped under the borrow.
        let ended = LENT.try_with(|lent| {
            let mut lent = lent.borrow_mut();
            let at = lent.iter().position(|(number, _)| *number == self.number)?;
            Some(lent.remove(at).1)
        });
        ended.iter().flatten().for_each(|ended| ended.note_inactive());
    }
}

impl fmt::Debug for LentEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentEngine").finish_non_exhaustive()
    }
}

/// Turns this thread's engines until `done` returns true. `done` gets the context whose waker ends
/// the sleep. Returns early if no engine has operations of a cache, or the kernel refuses to wait.
#[cfg_attr(offlock_model, expect(dead_code, reason = "`lent` is in a model"))]
pub(crate) fn wait_by_engine(mut done: impl FnMut(&mut Context<'_>) -> bool) {
    while next_busy_inactive(0).is_some() {
        // A thread can sleep on one engine only, so it polls while inactive ones have operations.
        if done(&mut Context::from_waker(Waker::noop())) {
            return;
        }
        turn_engine();
        thread::sleep(Duration::from_micros(50));
    }
    let Some(local) = busy_engine() else { return };
    let wait = poll_fn(|context| if done(context) { Poll::Ready(()) } else { Poll::Pending });
    let _ = local.engine.block_on_inner(wait);
}

/// Turns this thread's engines once, without a wait. Returns whether one had operations of a cache.
pub(crate) fn turn_engine() -> bool {
    let lent = busy_engine();
    lent.iter().for_each(|local| _ = local.engine.turn_inner());
    let (mut any, mut at) = (lent.is_some(), 0);
    while let Some((next, engine)) = next_busy_inactive(at) {
        engine.turn_inner();
        (any, at) = (true, next);
    }
    any
}

/// Waits until a write on this thread's engine for writes ends. Returns false at once if it has
/// none.
#[cfg_attr(offlock_model, expect(dead_code, reason = "a model has no engine"))]
pub(crate) fn wait_for_writes() -> bool {
    let known = WRITE_ENGINE.try_with(|own| own.get().cloned().flatten()).ok().flatten();
    let Some(local) = known.filter(|local| local.in_flight.get() > 0) else { return false };
    // The kernel refuses to wait if a descriptor of the engine was closed from outside. The write
    // may still be in flight, and the bytes must stay until it ends.
    if local.engine.wait(None).is_err() {
        thread::sleep(Duration::from_millis(1));
    }
    true
}
