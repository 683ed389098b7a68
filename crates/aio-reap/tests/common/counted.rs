//! Buffers that tell when they are freed.
#![allow(dead_code, reason = "not every test program uses both")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aio_reap::{AlignedBuf, IoBuf, IoBufMut};

/// Aligned bytes, which are overwritten when they are freed, and the number of freed buffers.
pub(crate) struct Counted(pub(crate) AlignedBuf, Arc<AtomicU64>);

impl Counted {
    pub(crate) fn new(len: usize, byte: u8, freed: &Arc<AtomicU64>) -> Self {
        let mut bytes = AlignedBuf::zeroed(len, 4096);
        bytes.fill(byte);
        Self(bytes, Arc::clone(freed))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fill(0xdd);
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

/// Bytes, and a closure that runs when they are freed.
pub(crate) struct OnDrop<F: FnMut() + 'static>(pub(crate) Vec<u8>, pub(crate) F);

impl<F: FnMut() + 'static> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.1)();
    }
}

// SAFETY: it returns the memory of the buffer inside, which no code uses while the engine has the
// value.
unsafe impl IoBuf for Counted {
    fn as_ptr(&self) -> *const u8 {
        IoBuf::as_ptr(&self.0)
    }

    fn len(&self) -> usize {
        IoBuf::len(&self.0)
    }
}

// SAFETY: it returns the memory of the buffer inside, which is valid for writing.
unsafe impl IoBufMut for Counted {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        IoBufMut::as_mut_ptr(&mut self.0)
    }
}

// SAFETY: it returns the memory of the `Vec` inside, which no code uses while the engine has the
// value.
unsafe impl<F: FnMut() + 'static> IoBuf for OnDrop<F> {
    fn as_ptr(&self) -> *const u8 {
        IoBuf::as_ptr(&self.0)
    }

    fn len(&self) -> usize {
        IoBuf::len(&self.0)
    }
}
