//! A thread's place to sleep until another thread wakes it.

use std::sync::Arc;
use std::task::Wake;

use percpu::sync::{Futex, step};

use crate::deadline::{Wait, sleep};

/// The futex of one thread. A waking thread holds a reference of its own, because the sleeping
/// thread may exit as soon as it sees the end of its wait.
#[derive(Debug)]
pub(crate) struct Parker {
    woken: Futex,
}

percpu::sync::thread_local! {
    static CURRENT: Arc<Parker> = Parker::new();
}

impl Parker {
    fn new() -> Arc<Self> {
        Arc::new(Self { woken: Futex::new() })
    }

    /// Returns the parker of the calling thread. Allocates once for each thread.
    pub(crate) fn current() -> Arc<Self> {
        // During thread exit the thread-local variable may be gone already: then a new parker serves.
        CURRENT.try_with(Arc::clone).unwrap_or_else(|_| Self::new())
    }

    /// Sleeps until `is_done` returns true, or until the deadline.
    pub(crate) fn park(&self, wait: Wait, mut is_done: impl FnMut() -> bool) {
        loop {
            let seen = self.woken.load();
            step!(
                "park: check again before the sleep",
                if is_done() {
                    return;
                }
            );
            if wait.is_over() {
                return;
            }
            sleep(&self.woken, seen, wait);
        }
    }

    /// Wakes the thread to check `is_done` again.
    pub(crate) fn unpark(&self) {
        self.woken.advance();
        self.woken.wake_one();
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.unpark();
    }
}
