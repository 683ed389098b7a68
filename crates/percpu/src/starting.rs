//! Whether the first use of the crate is in progress, for an allocator that counts.
//!
//! The first use allocates. An allocator that counts with a [`PerCpuCounter`](crate::PerCpuCounter)
//! then calls the crate again. It would wait for the first use to end: for a `OnceLock` that is
//! being initialised, or for the pool of words. The counter therefore checks [`is_starting`] first,
//! and adds to the shared sum if it is true.
//!
//! Most of the first use runs on the calling thread, and a thread-local depth marks it. The
//! self-test of the sections may run on a helper thread, which allocates while the calling thread
//! waits for it inside the `OnceLock`. The standard library allocates on the helper thread before
//! its closure begins and after it ends. A mark set by the closure would come too late, so a count
//! for the whole process covers the helper thread.

#[cfg(not(offlock_model))]
mod imp {
    use std::cell::Cell;

    use offlock_sync::native::atomic::{AtomicU32, Ordering};

    std::thread_local! {
        // Nothing to drop, so it can be read at any point of a thread's exit.
        static DEPTH: Cell<u32> = const { Cell::new(0) };
    }

    /// The number of first uses that wait for a helper thread.
    static HELPERS: AtomicU32 = AtomicU32::new(0);

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

    /// Runs `f`, which starts a helper thread and waits for its end. Meanwhile [`is_starting`] is
    /// true on every thread.
    #[allow(dead_code, reason = "only a build with sections tests them")]
    pub(crate) fn starting_with_helper<R>(f: impl FnOnce() -> R) -> R {
        struct HelperGuard;
        impl Drop for HelperGuard {
            fn drop(&mut self) {
                // Ordering: Relaxed; the helper has ended. Other threads may see the old count for
                // a while.
                HELPERS.fetch_sub(1, Ordering::Relaxed);
            }
        }
        // Ordering: Relaxed; the start of the helper thread carries it to that thread, and no other
        // thread needs to see it.
        HELPERS.fetch_add(1, Ordering::Relaxed);
        let _helper = HelperGuard;
        f()
    }

    /// Returns whether the calling thread may be inside a first use.
    pub(crate) fn is_starting() -> bool {
        // Ordering: Relaxed; the start of the helper thread has carried the increment to it. Any
        // other thread may use the words or the shared sum, whichever value it reads.
        DEPTH.get() != 0 || HELPERS.load(Ordering::Relaxed) != 0
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

#[cfg(not(offlock_model))]
#[allow(unused_imports, reason = "only a build with sections tests them")]
pub(crate) use self::imp::starting_with_helper;
pub(crate) use self::imp::{is_starting, starting};
