//! Buffers that the engine can own while the kernel works on them.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;
use std::slice;

use crate::registry::{Registration, Registry};

/// A buffer the kernel may read from.
///
/// # Safety
///
/// From the moment the value is handed to the engine until it comes back, including while it is
/// moved:
///
/// 1. `as_ptr` keeps returning the same address and `len` the same length;
/// 2. the `len` bytes there are initialised and stay allocated;
/// 3. nothing else writes to them (for [`IoBufMut`]: nothing else touches them).
pub unsafe trait IoBuf: 'static {
    /// Address of the first byte.
    fn as_ptr(&self) -> *const u8;

    /// Length in bytes: what a request transfers.
    fn len(&self) -> usize;

    /// The registration of the [`BufferPool`](crate::BufferPool) that the bytes lie in, if they
    /// do. A type that wraps a [`PoolBuf`](crate::PoolBuf) passes it on; the kernel refuses the
    /// request (`EFAULT`) if the bytes lie elsewhere.
    fn registered(&self) -> Option<Registered<'_>> {
        None
    }

    /// Whether a request on this buffer has nothing to transfer.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A buffer the kernel may write to.
///
/// # Safety
///
/// As for [`IoBuf`], and `as_mut_ptr` returns the address of `as_ptr` with leave to write `len`
/// bytes. Any byte values are valid there.
pub unsafe trait IoBufMut: IoBuf {
    /// Address of the first byte, for writing.
    fn as_mut_ptr(&mut self) -> *mut u8;
}

/// What an engine needs to know of a registered buffer: [`IoBuf::registered`].
#[derive(Clone, Copy, Debug)]
pub struct Registered<'a>(&'a Registration);

impl<'a> Registered<'a> {
    pub(crate) fn new(registration: &'a Registration) -> Self {
        Self(registration)
    }

    pub(crate) fn number_in(self, registry: &Rc<Registry>) -> Option<u16> {
        self.0.number_in(registry)
    }
}

// SAFETY: the bytes live on the heap, so moving the `Vec` leaves them in place; `len` counts
// initialised elements; the engine owns the `Vec`, so nobody else reaches them.
unsafe impl IoBuf for Vec<u8> {
    fn as_ptr(&self) -> *const u8 {
        Vec::as_ptr(self)
    }

    fn len(&self) -> usize {
        Vec::len(self)
    }
}

// SAFETY: as above; `Vec::as_mut_ptr` is the same address.
unsafe impl IoBufMut for Vec<u8> {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        Vec::as_mut_ptr(self)
    }
}

// SAFETY: a `'static` slice is borrowed for ever, immutable and initialised.
unsafe impl IoBuf for &'static [u8] {
    fn as_ptr(&self) -> *const u8 {
        <[u8]>::as_ptr(self)
    }

    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
}

/// A zero-initialised heap buffer with a chosen alignment, as `O_DIRECT` needs it.
///
/// Its length may be changed up to its capacity without touching the allocation.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
    layout: Layout,
}

impl AlignedBuf {
    /// Allocates `len` zero bytes aligned to `align`.
    ///
    /// Aborts as `Vec` does when memory is exhausted.
    ///
    /// # Panics
    ///
    /// Panics if `align` is not a power of two, or `len` rounded up to it overflows `isize`.
    pub fn zeroed(len: usize, align: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), align)
            .expect("alignment is a power of two and the size fits");
        Self::allocate(len, layout).unwrap_or_else(|| handle_alloc_error(layout))
    }

    /// As [`zeroed`](Self::zeroed); `None` where that aborts or panics.
    pub fn try_zeroed(len: usize, align: usize) -> Option<Self> {
        Self::allocate(len, Layout::from_size_align(len.max(1), align).ok()?)
    }

    /// `layout` has a size.
    fn allocate(len: usize, layout: Layout) -> Option<Self> {
        // SAFETY: both callers made the layout's size at least 1.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { ptr, len, layout })
    }

    /// The most bytes [`set_len`](Self::set_len) accepts: the length it was created with.
    pub fn capacity(&self) -> usize {
        self.layout.size()
    }

    /// Changes the length. Bytes past the old length keep what they held (at first zero).
    ///
    /// # Panics
    ///
    /// Panics if `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "length {len} exceeds capacity {}", self.capacity());
        self.len = len;
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` owns at least `len` bytes, zeroed at birth and only written since.
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` is exclusive.
        unsafe { slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, freed once.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf")
            .field("len", &self.len)
            .field("capacity", &self.capacity())
            .field("align", &self.layout.align())
            .finish()
    }
}

// SAFETY: it owns plain bytes that nothing else points to, like `Box<[u8]>`.
unsafe impl Send for AlignedBuf {}
// SAFETY: as above; `&AlignedBuf` only reads.
unsafe impl Sync for AlignedBuf {}

// SAFETY: the allocation does not move with the value, is initialised whole and owned alone.
unsafe impl IoBuf for AlignedBuf {
    fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }
}

// SAFETY: as above.
unsafe impl IoBufMut for AlignedBuf {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_buf_is_aligned_zero_and_resizable() {
        let mut buf = AlignedBuf::zeroed(8192, 4096);
        assert_eq!(buf.as_ptr() as usize % 4096, 0);
        assert!(buf.iter().all(|&byte| byte == 0));
        buf[8191] = 7;
        buf.set_len(100);
        assert_eq!(buf.len(), 100);
        buf.set_len(8192);
        assert_eq!(buf[8191], 7);
        assert!(AlignedBuf::try_zeroed(8192, 3).is_none());
        assert!(AlignedBuf::try_zeroed(isize::MAX as usize, 4096).is_none());
        assert_eq!(AlignedBuf::try_zeroed(8192, 4096).unwrap().capacity(), 8192);
    }

    #[test]
    #[should_panic(expected = "exceeds capacity")]
    fn aligned_buf_refuses_to_grow_past_its_capacity() {
        AlignedBuf::zeroed(16, 16).set_len(17);
    }
}
