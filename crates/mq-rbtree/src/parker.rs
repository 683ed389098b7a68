//! Where a thread sleeps until somebody has something for it.

use percpu::sync::{Arc, Futex, step};

use crate::deadline::{Deadline, sleep};

/// One for each thread that ever waited: whoever wakes it holds a reference of its own, because what
/// it waits with is gone as soon as it knows that the wait is over.
#[derive(Debug)]
pub(crate) struct Parker {
    woken: Futex,
}

percpu::sync::thread_local! {
    static CURRENT: Arc<Parker> = Arc::new(Parker { woken: Futex::new() });
}

impl Parker {
    /// This thread's. Allocates once in a thread.
    pub(crate) fn current() -> Arc<Self> {
        // A thread that waits in the destructor of another variable has lost its own.
        CURRENT.try_with(Arc::clone).unwrap_or_else(|_| Arc::new(Self { woken: Futex::new() }))
    }

    /// Sleeps until `is_done`, or the deadline: false.
    pub(crate) fn park(&self, deadline: Option<Deadline>, is_done: impl Fn() -> bool) -> bool {
        loop {
            let seen = self.woken.load();
            step!(
                "park: check again before the sleep",
                if is_done() {
                    return true;
                }
            );
            if deadline.is_some_and(|deadline| deadline.is_over()) {
                return false;
            }
            sleep(&self.woken, seen, deadline);
        }
    }

    /// Has the thread look again.
    pub(crate) fn unpark(&self) {
        self.woken.advance();
        self.woken.wake_one();
    }
}
