//! The spin lock of the bags and of the grace periods.

use offlock_sync::atomic::{AtomicBool, Ordering};
use offlock_sync::const_fn;
use offlock_sync::order;

/// A spin lock without a guard. Most callers only call [`try_lock`](SpinLock::try_lock).
#[derive(Debug)]
pub(super) struct SpinLock {
    held: AtomicBool,
}

impl SpinLock {
    const_fn! {
        pub(super) const fn new() -> Self {
            Self { held: AtomicBool::new(false) }
        }
    }

    /// Takes the lock if it is free. Never blocks.
    #[inline(always)]
    pub(super) fn try_lock(&self) -> bool {
        // Ordering: Acquire on success pairs with the Release in `unlock`; it carries the data that
        // the lock protects. Relaxed on failure: the data is not accessed.
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Releases the lock, which the caller holds.
    #[inline(always)]
    pub(super) fn unlock(&self) {
        // Ordering: Release pairs with the Acquire in `try_lock`; it carries the data that the lock
        // protects.
        self.held.store(false, order!(Release, "bag: the lists are consistent"));
    }
}
