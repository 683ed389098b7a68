//! A context that detects missing drops and double drops.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

const ALIVE: u64 = 0x0a11_fe0f_0c0f_fee5;

/// A context that is counted, and panics if it is read or dropped after its drop.
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
        // SAFETY: a field of `self`. The write is volatile because no read follows that a compiler can see.
        unsafe { (&raw mut self.alive).write_volatile(0xdead) };
        self.count.fetch_sub(1, Relaxed);
    }
}
