//! A thread's place to sleep until another thread wakes it.

use std::sync::Arc as StdArc;
use std::task::{Wake, Waker};

use percpu::sync::{Arc, Futex, step};

use crate::deadline::{Wait, sleep};

/// The futex of one thread. A waking thread holds a reference of its own, because the sleeping
/// thread may exit as soon as it sees the end of its wait.
#[derive(Debug)]
pub(crate) struct Parker {
    woken: Futex,
}

percpu::sync::thread_local! {
    static CURRENT: Arc<Parker> = Arc::new(Parker { woken: Futex::new() });
    static WAKER: Waker = ParkerWaker::of(Parker::current());
}

/// The waker of a thread that polls a future.
struct ParkerWaker(Arc<Parker>);

impl ParkerWaker {
    fn of(parker: Arc<Parker>) -> Waker {
        StdArc::new(Self(parker)).into()
    }
}

impl Wake for ParkerWaker {
    fn wake(self: StdArc<Self>) {
        self.0.unpark();
    }
}

impl Parker {
    /// Returns the parker of the calling thread. Allocates once for each thread.
    pub(crate) fn current() -> Arc<Self> {
        // During thread exit the thread-local variable may be gone already: then a new parker
        // serves.
        CURRENT.try_with(Arc::clone).unwrap_or_else(|_| Arc::new(Self { woken: Futex::new() }))
    }

    /// Returns the waker of the calling thread's parker. Allocates once for each thread.
    pub(crate) fn waker(current: &Arc<Self>) -> Waker {
        WAKER.try_with(Waker::clone).unwrap_or_else(|_| ParkerWaker::of(Arc::clone(current)))
    }

    /// Sleeps until `is_done` returns true, or until the deadline. Returns true if a signal has ended
    /// the wait.
    pub(crate) fn park(&self, wait: Wait, mut is_done: impl FnMut() -> bool) -> bool {
        loop {
            let seen = self.woken.load();
            step!(
                "park: check again before the sleep",
                if is_done() {
                    return false;
                }
            );
            if wait.is_over() {
                return false;
            }
            if sleep(&self.woken, seen, wait.deadline()) && wait.is_interruptible() {
                return true;
            }
        }
    }

    /// Wakes the thread to check `is_done` again.
    pub(crate) fn unpark(&self) {
        self.woken.advance();
        self.woken.wake_one();
    }
}
