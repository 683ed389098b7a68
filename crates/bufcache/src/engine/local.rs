//! The engines of a thread: the one that a program lends, and the one that the thread keeps for its writes.
//!
//! # Loads that are crossed
//!
//! A thread that waits for a load turns its own engine meanwhile, if that has loads: another thread may wait for
//! these, and no other thread reaps them. A load that ends wakes the engines of the threads that wait for it.
//! So loads that are crossed end, whatever plugs their threads hold: a wait submits first.

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

/// What a thread reads by.
pub(crate) struct ThreadEngine {
    pub(crate) engine: Rc<Engine>,
    /// Operations of caches that the engine has.
    pub(crate) in_flight: Rc<Cell<usize>>,
}

impl ThreadEngine {
    fn new(engine: Rc<Engine>, in_flight: Rc<Cell<usize>>) -> Rc<Self> {
        Rc::new(Self { engine, in_flight })
    }

    /// What this thread has of the engine; new, if that is not lent now. It counts what was begun before.
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

    /// Notes what the engine has, which is lent no more: waits turn it all the same.
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

    /// Counts an operation. Returns the count, for its end.
    pub(crate) fn begin_operation(&self) -> Rc<Cell<usize>> {
        self.in_flight.set(self.in_flight.get() + 1);
        Rc::clone(&self.in_flight)
    }
}

type Inactive = (rc::Weak<Engine>, Rc<Cell<usize>>);

thread_local! {
    /// The engines that are lent, with the numbers of their guards, ascending. The thread uses the last one.
    static LENT: RefCell<Vec<(u64, Rc<ThreadEngine>)>> = const { RefCell::new(Vec::new()) };
    /// Engines that were lent, with their operations of caches. An engine may be there and be lent again.
    static INACTIVE: RefCell<Vec<Inactive>> = const { RefCell::new(Vec::new()) };
}

/// The `at`th engine, or a later one, that is not lent now and has operations of a cache; and the number behind it.
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

/// The thread's engine; none while the thread ends.
pub(crate) fn lent_engine() -> Option<Rc<ThreadEngine>> {
    LENT.try_with(|lent| lent.borrow().last().map(|(_, local)| Rc::clone(local))).ok().flatten()
}

/// The thread's engine, if it reads blocks of a cache: another thread may wait for these, or this one.
fn busy_engine() -> Option<Rc<ThreadEngine>> {
    lent_engine().filter(|local| local.in_flight.get() > 0)
}

thread_local! {
    /// The engine that this thread keeps for the writes that it waits for; `None` where there can be none.
    ///
    /// They do not use the lent engine: a thread need not have one, and its slots may be taken by the program's
    /// requests, whose completions no wait inside the cache delivers.
    static WRITE_ENGINE: OnceCell<Option<Rc<ThreadEngine>>> = const { OnceCell::new() };
}

pub(crate) fn write_engine() -> Option<Rc<ThreadEngine>> {
    let new = || {
        let engine = Engine::new().ok()?;
        mem::forget(engine.plug()); // only waits submit, all that was begun at once
        Some(ThreadEngine::new(Rc::new(engine), Rc::default()))
    };
    WRITE_ENGINE.try_with(|own| own.get_or_init(new).clone()).ok().flatten()
}

/// Lets this thread read [`EngineDevice`](crate::EngineDevice)s by the engine, until the guard drops. Of several
/// engines that are lent, the thread uses the one that was lent last. Their guards may drop in any order.
///
/// A call that waits turns the engine only if the engine has operations of a cache, and then delivers only these.
/// No callback of the program runs inside a call of the cache, and no task is woken by a completion of the
/// program's: they wait for the thread's next own turn of the engine. The call submits what is pending, also behind
/// a [`Plug`](aio_reap::Plug). All that holds, too, for an engine that was lent before, until its operations of caches
/// have ended. If the program's requests leave no slot, a thread of the cache does the work.
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

/// Lends an engine to the calls of the cache on this thread until dropped. From [`lend_engine`].
#[must_use = "the engine is lent only while the guard lives"]
pub struct LentEngine {
    number: u64,
    _thread: PhantomData<*const ()>,
}

impl Drop for LentEngine {
    fn drop(&mut self) {
        // What it takes may be the last handle of the engine: not dropped under the borrow.
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

/// Turns this thread's engine until `done`, which it tells a waker that is to be called then. Returns
/// at once where the thread has no engine, or the kernel refuses to wait.
#[cfg_attr(any(offlock_loom, offlock_shuttle), expect(dead_code, reason = "`lent` is in a model"))]
pub(crate) fn wait_by_engine(mut done: impl FnMut(&mut Context<'_>) -> bool) {
    while next_busy_inactive(0).is_some() {
        // No wait has several engines, so this looks again and again; until only the lent one has operations.
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

/// Lets this thread's engine go on. Returns whether it has operations of a cache.
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

/// Waits until a write ends that is in the engine of this thread for writes. Returns false at once if none is.
#[cfg_attr(any(offlock_loom, offlock_shuttle), expect(dead_code, reason = "a model has no engine"))]
pub(crate) fn wait_for_writes() -> bool {
    let known = WRITE_ENGINE.try_with(|own| own.get().cloned().flatten()).ok().flatten();
    let Some(local) = known.filter(|local| local.in_flight.get() > 0) else { return false };
    // The kernel refuses to wait where a descriptor of the engine was closed from outside. It may have the bytes
    // all the same.
    if local.engine.wait(None).is_err() {
        thread::sleep(Duration::from_millis(1));
    }
    true
}
