//! Is this thread in the middle of what the first use of the crate does?
//!
//! That allocates. An allocator that counts by a [`PerCpuCounter`](crate::PerCpuCounter) then comes
//! back into the crate on the same thread, and would wait for itself: for a `OnceLock` that it is
//! initialising, or for the pool of words. It asks here, and adds to the shared sum instead.

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod imp {
    use std::cell::Cell;

    std::thread_local! {
        // Nothing to drop, so it can be read at any point of a thread's exit.
        static DEPTH: Cell<u32> = const { Cell::new(0) };
    }

    struct Entered;

    impl Drop for Entered {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }

    /// Runs `f`, in which [`is_starting`] is true on this thread.
    pub(crate) fn starting<R>(f: impl FnOnce() -> R) -> R {
        DEPTH.set(DEPTH.get() + 1);
        let _entered = Entered;
        f()
    }

    pub(crate) fn is_starting() -> bool {
        DEPTH.get() != 0
    }
}

/// A model has no allocator of its own, and its threads share one of the system.
#[cfg(any(offlock_loom, offlock_shuttle))]
mod imp {
    pub(crate) fn starting<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    pub(crate) fn is_starting() -> bool {
        false
    }
}

pub(crate) use self::imp::{is_starting, starting};
