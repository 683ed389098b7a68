//! The counters of an array.

use percpu::sync::native::atomic::{AtomicU64, Ordering::Relaxed};

/// The numbers of entries and reservations. Written under the array's lock.
#[derive(Debug)]
pub(super) struct Counts {
    entries: AtomicU64,
    reserved: AtomicU64,
}

impl Counts {
    pub(super) const fn new() -> Self {
        Self { entries: AtomicU64::new(0), reserved: AtomicU64::new(0) }
    }

    pub(super) fn entries(&self) -> u64 {
        // Ordering: Relaxed, in all of these functions; statistics, which publish nothing.
        self.entries.load(Relaxed)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved.load(Relaxed)
    }

    pub(super) fn add_entries(&self, by: i64) {
        self.entries.store(self.entries().wrapping_add_signed(by), Relaxed);
    }

    pub(super) fn add_reserved(&self, by: i64) {
        self.reserved.store(self.reserved().wrapping_add_signed(by), Relaxed);
    }
}
