//! A model of a thread's I/O engine: reads end when their thread turns it, and a waker ends its
//! sleep.
//!
//! The real engine makes system calls, which a checker does not see. This one has the two
//! operations that the cache needs: a turn, and a wait that polls, turns, and sleeps only if no
//! wake-up came since the poll.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use offlock_sync::{Futex, thread_local};

type Read = Box<dyn FnOnce()>;

struct Engine {
    begun: RefCell<VecDeque<Read>>,
    bell: Arc<Bell>,
    /// Its waits poll once and fail, as if the kernel refused to wait.
    fails: bool,
}

struct Bell(Futex);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.advance();
        self.0.wake_all();
    }
}

thread_local! {
    static LENT: RefCell<Option<Rc<Engine>>> = RefCell::new(None);
}

/// The guard of a lent engine. The thread has the engine until the guard drops.
#[derive(Debug)]
#[must_use = "the engine is lent only while the guard lives"]
pub struct Lent(PhantomData<*const ()>);

/// Lends this thread an engine.
pub fn lend() -> Lent {
    lend_new(false)
}

/// Gives this thread an engine whose waits fail.
pub fn lend_failing() -> Lent {
    lend_new(true)
}

fn lend_new(fails: bool) -> Lent {
    let engine = Engine { begun: RefCell::default(), bell: Arc::new(Bell(Futex::new())), fails };
    LENT.with(|lent| *lent.borrow_mut() = Some(Rc::new(engine)));
    Lent(PhantomData)
}

impl Lent {
    /// Turns the engine until no read is left.
    pub fn drain(&self) {
        while engine().is_some_and(|engine| engine.turn()) {}
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let ended = LENT.with(|lent| lent.borrow_mut().take());
        drop(ended); // outside of the borrow, because its loads may use `LENT`
    }
}

fn engine() -> Option<Rc<Engine>> {
    LENT.with(|lent| lent.borrow().clone())
}

/// Returns whether this thread has an engine.
pub fn is_lent() -> bool {
    engine().is_some()
}

/// Queues a read on this thread's engine, which makes it in a later turn.
///
/// # Panics
///
/// Panics if the thread has no engine.
pub fn begin(read: impl FnOnce() + 'static) {
    let engine = engine().expect("this thread has an engine");
    engine.begun.borrow_mut().push_back(Box::new(read));
}

impl Engine {
    fn turn(&self) -> bool {
        // Ends the borrow, because `read` may begin reads.
        let read = self.begun.borrow_mut().pop_front();
        read.map(|read| read()).is_some()
    }
}

pub(crate) fn turn_engine() -> bool {
    engine().is_some_and(|engine| engine.turn())
}

pub(crate) fn wait_by_engine(mut done: impl FnMut(&mut Context<'_>) -> bool) {
    let Some(engine) = engine() else { return };
    let waker = Waker::from(Arc::clone(&engine.bell));
    let mut context = Context::from_waker(&waker);
    if engine.fails {
        done(&mut context);
        return;
    }
    let mut polled = None;
    loop {
        let seen = engine.bell.0.load();
        if polled != Some(seen) && done(&mut context) {
            return;
        }
        polled = Some(seen);
        if !engine.turn() {
            engine.bell.0.wait(seen);
        }
    }
}
