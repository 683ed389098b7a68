//! Whether the first use of the crate is in progress, for an allocator that counts.
//!
//! The first use allocates. An allocator that counts with a [`PerCpuCounter`](crate::PerCpuCounter)
//! then calls the crate again. It would wait for the first use to end: for a `OnceLock` that is
//! being initialised, or for the pool of words. The counter therefore checks [`is_starting`] first,
//! and adds to the shared sum if it is true.
//!
//! The first use runs on the calling thread, and a thread-local depth marks it.

#[cfg(not(offlock_model))]
mod imp {
    use std::cell::Cell;

    std::thread_local! {
        // Nothing to drop, so it can be read at any point of a thread's exit.
        static DEPTH: Cell<u32> = const { Cell::new(0) };
    }

    struct DepthGuard;

    impl Drop for DepthGuard {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }

    /// Runs `f`. Meanwhile [`is_starting`] is true on the calling thread.
    pub(crate) fn starting<R>(f: impl FnOnce() -> R) -> R {
        DEPTH.set(DEPTH.get() + 1);
        let _depth = DepthGuard;
        f()
    }

    /// Returns whether the calling thread is inside a first use.
    pub(crate) fn is_starting() -> bool {
        DEPTH.get() != 0
    }
}

/// A model has no allocator that counts, and its threads run on one OS thread.
#[cfg(offlock_model)]
mod imp {
    pub(crate) fn starting<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    pub(crate) fn is_starting() -> bool {
        false
    }
}

pub(crate) use self::imp::{is_starting, starting};
