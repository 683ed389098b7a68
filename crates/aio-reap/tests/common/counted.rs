//! A buffer that counts when it is freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aio_reap::{IoBuf, IoBufMut};

/// The bytes, and the shared number of freed buffers.
pub(crate) struct Counted(pub(crate) Vec<u8>, pub(crate) Arc<AtomicU64>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fill(0xdd);
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: it returns the memory of the `Vec` inside, which no code uses while the engine has the
// value.
unsafe impl IoBuf for Counted {
    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

// SAFETY: it returns the memory of the `Vec` inside, which is valid for writing.
unsafe impl IoBufMut for Counted {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
}
