//! A context that tells of a drop too many, or too few.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

const ALIVE: u64 = 0x0a11_fe0f_0c0f_fee5;

/// A context that is counted, and screams when it is read or dropped after its drop.
pub(super) struct Canary {
    alive: u64,
    value: u64,
    count: Arc<AtomicI64>,
}

impl Canary {
    pub(super) fn new(value: u64, count: &Arc<AtomicI64>) -> Self {
        count.fetch_add(1, Relaxed);
        Self { alive: ALIVE, value, count: Arc::clone(count) }
    }

    pub(super) fn read(&self) -> u64 {
        assert_eq!(self.alive, ALIVE, "read after its drop");
        self.value
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        assert_eq!(self.alive, ALIVE, "dropped twice");
        // SAFETY: ours; volatile, as nobody is to read it.
        unsafe { (&raw mut self.alive).write_volatile(0xdead) };
        self.count.fetch_sub(1, Relaxed);
    }
}
