//! Tells whether the first use of the crate is in progress, for an allocator that counts.
//!
//! The first use allocates. An allocator that counts by a [`PerCpuCounter`](crate::PerCpuCounter)
//! then calls the crate again, and would wait for the first use to end: for a `OnceLock` that is
//! being initialised, or for the pool of words. The counter asks here first, and adds to the shared
//! sum instead.
//!
//! Most of the first use runs on the calling thread, and a thread-local depth marks it. The self-test
//! of the sections may run on a helper thread, which allocates while the calling thread waits for it
//! inside the `OnceLock`. The standard library allocates on that thread before its closure begins and
//! after it ends, so no mark that the closure sets is early enough: a flag for the whole process
//! covers it.

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod imp {
    use std::cell::Cell;

    use crate::sync::native::atomic::{AtomicU32, Ordering};

    std::thread_local! {
        // Nothing to drop, so it can be read at any point of a thread's exit.
        static DEPTH: Cell<u32> = const { Cell::new(0) };
    }

    /// How many first uses wait for a helper thread.
    static HELPED: AtomicU32 = AtomicU32::new(0);

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

    /// Runs `f`, which starts a thread and waits for its end. [`is_starting`] is true on every
    /// thread meanwhile.
    #[cfg(any(test, all(target_arch = "x86_64", not(any(offlock_portable, offlock_virtual_cpu)))))]
    pub(crate) fn starting_with_helper<R>(f: impl FnOnce() -> R) -> R {
        struct Helped;
        impl Drop for Helped {
            fn drop(&mut self) {
                // Ordering: Relaxed; the helper has ended, and other threads may see this late.
                HELPED.fetch_sub(1, Ordering::Relaxed);
            }
        }
        // Ordering: Relaxed; the start of the helper thread carries it to that thread, and no other
        // thread needs to see it.
        HELPED.fetch_add(1, Ordering::Relaxed);
        let _helped = Helped;
        f()
    }

    pub(crate) fn is_starting() -> bool {
        // Ordering: Relaxed; on the helper thread its start has carried the increment here. Any
        // other thread may use the words or the shared sum, whatever it reads.
        DEPTH.get() != 0 || HELPED.load(Ordering::Relaxed) != 0
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

#[cfg(all(
    not(any(offlock_loom, offlock_shuttle)),
    any(test, all(target_arch = "x86_64", not(any(offlock_portable, offlock_virtual_cpu))))
))]
pub(crate) use self::imp::starting_with_helper;
pub(crate) use self::imp::{is_starting, starting};
