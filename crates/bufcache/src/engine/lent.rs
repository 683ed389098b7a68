//! What a thread's engine is in a model: reads that end when their thread turns it, and a bell by which
//! others end its sleep.
//!
//! The shipped engine makes system calls, which no checker sees. What the cache asks of it is here: its
//! turn, and a wait that polls, turns, and sleeps only if nobody has rung since the poll.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use percpu::sync::{Futex, thread_local};

type Read = Box<dyn FnOnce()>;

struct Engine {
    begun: RefCell<VecDeque<Read>>,
    bell: Arc<Bell>,
    /// Its waits poll once and fail, as where the kernel refuses to wait.
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

/// This thread has an engine while it lives.
#[derive(Debug)]
#[must_use = "the engine is lent only while the guard lives"]
pub struct Lent(PhantomData<*const ()>);

/// Gives this thread an engine.
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
    /// Turns it until it has nothing left.
    pub fn drain(&self) {
        while engine().is_some_and(|engine| engine.turn()) {}
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let ended = LENT.with(|lent| lent.borrow_mut().take());
        drop(ended); // outside of the borrow: it may have loads
    }
}

fn engine() -> Option<Rc<Engine>> {
    LENT.with(|lent| lent.borrow().clone())
}

/// Whether this thread has one.
pub fn is_lent() -> bool {
    engine().is_some()
}

/// Lets this thread's engine have a read, which it does in a turn to come.
///
/// # Panics
///
/// Panics if the thread has none.
pub fn begin(read: impl FnOnce() + 'static) {
    let engine = engine().expect("this thread has an engine");
    engine.begun.borrow_mut().push_back(Box::new(read));
}

impl Engine {
    fn turn(&self) -> bool {
        let read = self.begun.borrow_mut().pop_front(); // and not borrowed any more
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
