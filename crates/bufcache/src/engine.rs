//! The I/O engine that a thread has lent, and the waits that are refused because of it.
//!
//! An operation in an engine ends when the engine's thread turns the engine, which no call of the cache
//! does. So a thread that blocks for an operation in its own engine would wait for ever, as would two
//! threads that block for operations in each other's engines. A thread that has an operation in its
//! engine is therefore refused each wait for an operation in an engine, whichever it is:
//!
//! ```text
//!   thread A                                   thread B
//!   mark its operation as one in an engine     mark its operation
//!   fence                                      fence
//!   B's operation is marked? refuse            A's operation is marked? refuse
//! ```
//!
//! With a fence on both sides, at least one of the two sees the other. In a ring of more threads it is
//! the last one to pass its fence, because each of the others has marked its operations before that.

use std::cell::Cell;
#[cfg(feature = "aio-reap")]
use std::marker::PhantomData;

#[cfg(feature = "aio-reap")]
use offlock_sync::Arc;
use offlock_sync::atomic::{Ordering, fence};
use offlock_sync::const_thread_local;

#[cfg(feature = "aio-reap")]
pub(crate) use self::lent::lent_engine;
#[cfg(feature = "aio-reap")]
pub use self::lent::{LentEngine, lend_engine};
#[cfg(feature = "aio-reap")]
use crate::source::Source;

const_thread_local! {
    /// The number of operations of caches in the engines of this thread.
    static IN_FLIGHT: Cell<usize> = Cell::new(0);
}

/// Counts an operation in an engine of this thread until it drops.
#[cfg(feature = "aio-reap")]
pub(crate) struct InEngine {
    /// The device that the operation changes. `None` for a load, which the header of its frame marks.
    changed: Option<Arc<Source>>,
    _thread: PhantomData<*const ()>,
}

#[cfg(feature = "aio-reap")]
impl InEngine {
    pub(crate) fn new(changed: Option<Arc<Source>>) -> Self {
        IN_FLIGHT.with(|count| count.set(count.get() + 1));
        // Ordering: Relaxed, here and in the drop; the fence in `refuses_wait` orders it.
        changed.iter().for_each(|source| _ = source.in_engines.fetch_add(1, Ordering::Relaxed));
        Self { changed, _thread: PhantomData }
    }
}

#[cfg(feature = "aio-reap")]
impl Drop for InEngine {
    fn drop(&mut self) {
        let changed = self.changed.iter();
        changed.for_each(|source| _ = source.in_engines.fetch_sub(1, Ordering::Relaxed));
        let _ended = IN_FLIGHT.try_with(|count| count.set(count.get() - 1));
    }
}

/// Returns whether a wait of this thread for an operation is refused. `is_in_engine` returns whether
/// the operation is in an engine.
pub(crate) fn refuses_wait(is_in_engine: impl FnOnce() -> bool) -> bool {
    if IN_FLIGHT.with(Cell::get) == 0 {
        return false;
    }
    // Ordering: SeqCst fence, against the same fence of the thread whose operation is waited for; see
    // the module. The models pass without it: they wait for loads, and a get runs the fence of its
    // hazard slot before.
    fence(Ordering::SeqCst);
    is_in_engine()
}

/// The engines that the program lends.
#[cfg(feature = "aio-reap")]
mod lent {
    use std::cell::RefCell;
    use std::marker::PhantomData;
    use std::rc::Rc;

    use aio_reap::Engine;

    std::thread_local! {
        static LENT: RefCell<Option<Rc<Engine>>> = const { RefCell::new(None) };
    }

    /// Returns the engine that this thread has lent. `None` without one, and while the thread ends.
    pub(crate) fn lent_engine() -> Option<Rc<Engine>> {
        LENT.try_with(|lent| lent.borrow().clone()).ok().flatten()
    }

    /// Makes [`FileDevice`](crate::FileDevice)s use the engine for readahead, and for operations
    /// that tasks begin on this thread, until the guard drops.
    ///
    /// These operations end when the thread turns the engine, as each request of an engine does. A call
    /// of the cache never turns it, and submits without a look at completions: inside a call of the cache
    /// no callback of the program runs.
    ///
    /// A call that blocks makes its reads and writes by system calls. While an operation of a cache is in
    /// an engine of the thread, a call that would block for an operation in an engine, of this thread or
    /// of another, is refused with `WouldDeadlock`: turn the engine, or use the async form. Changes (writes,
    /// syncs, discards) of a device in an engine count for each call that blocks for changes of the
    /// device. If the requests of the program leave no slot, a thread of the cache makes the operation.
    ///
    /// # Panics
    ///
    /// Panics if the thread has lent an engine already.
    #[track_caller]
    pub fn lend_engine(engine: &Rc<Engine>) -> LentEngine {
        LENT.with_borrow_mut(|lent| {
            assert!(lent.is_none(), "the thread has lent an engine");
            *lent = Some(Rc::clone(engine));
        });
        LentEngine { _thread: PhantomData }
    }

    /// The guard of a lent engine, from [`lend_engine`].
    #[derive(Debug)]
    #[must_use = "the engine is lent only while the guard lives"]
    pub struct LentEngine {
        _thread: PhantomData<*const ()>,
    }

    impl Drop for LentEngine {
        fn drop(&mut self) {
            // Perhaps the last handle of the engine, so it is not dropped under the borrow.
            let _ended = LENT.try_with(RefCell::take);
        }
    }
}
