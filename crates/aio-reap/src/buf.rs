//! The traits of buffers that the engine owns while the kernel works on them, and an aligned
//! buffer.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::{fmt, ptr, slice};

use crate::op::Memory;

/// A buffer that the kernel may read from: `Vec<u8>`, `Box<[u8]>`, `String`, static bytes and
/// strings, [`AlignedBuf`], and with the feature `bytes` `Bytes` and `BytesMut`.
///
/// A request transfers all [`len`](Self::len) bytes, never the spare capacity.
///
/// # Safety
///
/// From the submission of the value to the engine until its return, and while the value moves:
///
/// 1. `as_ptr` returns the same address and `len` the same length;
/// 2. the `len` bytes at that address are initialised and stay allocated;
/// 3. no other code writes to them (for [`IoBufMut`]: reads or writes them).
///
/// ```
/// use aio_reap::{Engine, IoBuf};
/// use std::sync::Arc;
///
/// /// Bytes that several requests write.
/// #[derive(Clone)]
/// struct Shared(Arc<[u8]>);
///
/// // SAFETY: the bytes are on the heap, initialised, and immutable while a clone of the `Arc` lives.
/// unsafe impl IoBuf for Shared {
///     fn as_ptr(&self) -> *const u8 {
///         self.0.as_ptr()
///     }
///
///     fn len(&self) -> usize {
///         self.0.len()
///     }
/// }
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let bytes = Shared(Arc::from(*b"twice"));
/// let first = engine.write(&file, bytes.clone(), 0).submit()?;
/// let second = engine.write(&file, bytes, 5).submit()?;
/// assert_eq!(first.wait().0? + second.wait().0?, 10);
/// # Ok(())
/// # }
/// ```
pub unsafe trait IoBuf: 'static {
    /// Returns the address of the first byte.
    fn as_ptr(&self) -> *const u8;

    /// Returns the length in bytes, which a request transfers.
    fn len(&self) -> usize;

    /// Returns whether a request on this buffer transfers nothing.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A buffer that the kernel may write to: `Vec<u8>`, `Box<[u8]>`, [`AlignedBuf`], and with the
/// feature `bytes` `BytesMut`.
///
/// A read fills at most [`len`](IoBuf::len) bytes, so give it the length that you want to read:
/// `vec![0; 4096]`, not `Vec::with_capacity(4096)`.
///
/// # Safety
///
/// The conditions of [`IoBuf`] hold. `as_mut_ptr` returns the address of `as_ptr`, valid for
/// writing `len` bytes of any value.
///
/// ```
/// use aio_reap::{Engine, IoBuf, IoBufMut};
///
/// /// A block of a cache.
/// struct Block(Box<[u8; 512]>);
///
/// // SAFETY: the array is on the heap and initialised, and the engine owns the box.
/// unsafe impl IoBuf for Block {
///     fn as_ptr(&self) -> *const u8 {
///         self.0.as_ptr()
///     }
///
///     fn len(&self) -> usize {
///         512
///     }
/// }
///
/// // SAFETY: the address is that of `as_ptr`, and every byte of the array may have any value.
/// unsafe impl IoBufMut for Block {
///     fn as_mut_ptr(&mut self) -> *mut u8 {
///         self.0.as_mut_ptr()
///     }
/// }
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(std::fs::File::open("/dev/zero")?)?;
/// let (read, block) = engine.read(&file, Block(Box::new([7; 512])), 0).submit()?.wait();
/// assert_eq!((read?, block.0[511]), (512, 0));
/// # Ok(())
/// # }
/// ```
pub unsafe trait IoBufMut: IoBuf {
    /// Returns the address of the first byte, for writing.
    fn as_mut_ptr(&mut self) -> *mut u8;
}

/// Implements [`IoBuf`] for types of bytes.
macro_rules! io_bufs {
    ($($(#[$feature:meta])? $(const $len:ident =>)? $type:ty,)*) => {$(
        $(#[$feature])?
        // SAFETY: the bytes are on the heap or static, so a move of the value leaves them in place, and
        // they are initialised. The engine owns the value, and no other value that reaches the bytes
        // writes to them.
        unsafe impl$(<const $len: usize>)? IoBuf for $type {
            fn as_ptr(&self) -> *const u8 {
                AsRef::<[u8]>::as_ref(self).as_ptr()
            }

            fn len(&self) -> usize {
                AsRef::<[u8]>::as_ref(self).len()
            }
        }
    )*};
}

io_bufs! {
    Vec<u8>,
    Box<[u8]>,
    &'static [u8],
    const N => &'static [u8; N],
    &'static str,
    String, // not an `IoBufMut`: a read could store bytes that are not UTF-8
    #[cfg(feature = "bytes")]
    bytes::Bytes,
    #[cfg(feature = "bytes")]
    bytes::BytesMut,
}

/// Implements [`IoBufMut`] for types that own their bytes.
macro_rules! io_bufs_mut {
    ($($(#[$feature:meta])? $type:ty,)*) => {$(
        $(#[$feature])?
        // SAFETY: the value owns the bytes, and no other value reaches them. The address is that of
        // `as_ptr`.
        unsafe impl IoBufMut for $type {
            fn as_mut_ptr(&mut self) -> *mut u8 {
                AsMut::<[u8]>::as_mut(self).as_mut_ptr()
            }
        }
    )*};
}

io_bufs_mut! {
    Vec<u8>,
    Box<[u8]>,
    #[cfg(feature = "bytes")]
    bytes::BytesMut,
}

/// A zero-initialised heap buffer with a chosen alignment, as `O_DIRECT` needs it.
///
/// Its length can change up to its capacity without an allocation.
///
/// ```
/// use aio_reap::AlignedBuf;
///
/// let mut buf = AlignedBuf::zeroed(8192, 4096);
/// buf[0] = 7;
/// buf.set_len(512); // no allocation
/// assert_eq!((buf.as_ptr() as usize % 4096, buf.len(), buf.capacity()), (0, 512, 8192));
/// ```
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
    layout: Layout,
}

impl AlignedBuf {
    /// Allocates `len` zero bytes aligned to `align`.
    ///
    /// Aborts like `Vec` if memory is exhausted.
    ///
    /// # Panics
    ///
    /// Panics if `align` is not a power of two, or if `len` rounded up to `align` overflows
    /// `isize`.
    pub fn zeroed(len: usize, align: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), align)
            .expect("alignment is a power of two and the size fits");
        Self::allocate(len, layout).unwrap_or_else(|| handle_alloc_error(layout))
    }

    /// Allocates like [`zeroed`](Self::zeroed), but returns `None` where that aborts or panics.
    pub fn try_zeroed(len: usize, align: usize) -> Option<Self> {
        Self::allocate(len, Layout::from_size_align(len.max(1), align).ok()?)
    }

    /// Allocates `layout`, whose size is not zero.
    fn allocate(len: usize, layout: Layout) -> Option<Self> {
        // SAFETY: `layout.size() > 0`: both callers, `zeroed` and `try_zeroed`, use at least 1.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { ptr, len, layout })
    }

    /// Returns the largest length that [`set_len`](Self::set_len) accepts: the length at creation.
    pub fn capacity(&self) -> usize {
        self.layout.size()
    }

    /// Changes the length in bytes, up to [`capacity`](Self::capacity). Bytes past the old length
    /// keep their values (at first zero).
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
        // SAFETY: the allocation at `ptr` has at least `len` bytes, which were zeroed when it was
        // made.
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocation at `ptr` has at least `len` initialised bytes, and `&mut self` is
        // exclusive.
        unsafe { slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: `allocate` made the allocation with this layout, and only this drop frees it.
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

// SAFETY: it owns plain bytes that no other value points to, like `Box<[u8]>`.
unsafe impl Send for AlignedBuf {}
// SAFETY: `&AlignedBuf` gives only reads of bytes that the buffer owns.
unsafe impl Sync for AlignedBuf {}

// SAFETY: the allocation stays in place if the value moves, is initialised completely, and has no
// other owner.
unsafe impl IoBuf for AlignedBuf {
    fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }
}

// SAFETY: the conditions of `IoBuf` hold for an `AlignedBuf`, and `ptr` was allocated for writing.
unsafe impl IoBufMut for AlignedBuf {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

/// A buffer whose address an operation has.
///
/// To move a `Box`, also inside another value, asserts that no other pointer reaches its memory: a
/// pointer that was taken before is invalid afterwards under Stacked Borrows, and the kernel would
/// use it. `MaybeUninit` makes no such assertion. So the address is taken from a buffer in here, and
/// the buffer leaves only after the completion, or if the request was not accepted.
pub(crate) struct HeldBuf<B>(MaybeUninit<B>);

impl<B> HeldBuf<B> {
    #[inline]
    pub(crate) fn new(buf: B) -> Self {
        Self(MaybeUninit::new(buf))
    }

    /// Returns the buffer, to take its address.
    #[inline]
    pub(crate) fn get_mut(&mut self) -> &mut B {
        // SAFETY: the buffer is initialised from `new` until `into_inner` or the drop, which
        // consume `self`.
        unsafe { self.0.assume_init_mut() }
    }

    /// Returns the buffer. The address is not used any more.
    #[inline]
    pub(crate) fn into_inner(self) -> B {
        let this = ManuallyDrop::new(self);
        // SAFETY: the buffer is initialised, and read once, because `this` is not dropped.
        unsafe { this.0.assume_init_read() }
    }
}

impl<B> Drop for HeldBuf<B> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the buffer is initialised, and not used after its drop.
        unsafe { self.0.assume_init_drop() }
    }
}

/// The maximum number of buffers in one call (`UIO_MAXIOV`, ABI).
const MAX_BUFFERS: usize = 1024;

/// A list of buffers that one [`read_vectored`](crate::Engine::read_vectored) or
/// [`write_vectored`](crate::Engine::write_vectored) transfers, first to last.
///
/// It dereferences to the slice of buffers. It also stores the vectors for the kernel, so a list
/// that is used again costs no allocation per request.
///
/// ```
/// use aio_reap::{BufList, Engine};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let list = BufList::new(vec![b"head".to_vec(), b"body".to_vec()]).expect("at most 1,024");
/// let (written, list) = engine.write_vectored(&file, list, 0).submit()?.wait();
/// assert_eq!(written?, 8);
/// let (read, list) = engine.read_vectored(&file, list, 4).submit()?.wait();
/// assert_eq!((read?, &list[0][..]), (4, &b"body"[..]));
/// # Ok(())
/// # }
/// ```
pub struct BufList<B> {
    bufs: Vec<B>,
    /// One entry per buffer, on the heap. The kernel reads them there, and the engine advances them
    /// after a short transfer.
    vectors: Box<[libc::iovec]>,
}

/// The memory of a transfer, and the sums that a request needs. It is valid until the buffer is used
/// again or moves, except inside a [`HeldBuf`].
pub(crate) struct IoMemory {
    pub(crate) memory: Memory,
    /// The first byte, or the first vector.
    pub(crate) ptr: *mut u8,
    /// The sum of the lengths in bytes.
    pub(crate) len: u64,
    /// All addresses ored together, and all lengths: their low bits show the alignment.
    pub(crate) addresses: usize,
    pub(crate) lengths: u64,
}

impl<B> BufList<B> {
    /// Makes a list of `bufs`, at most 1,024. Allocates the vectors.
    ///
    /// # Errors
    ///
    /// Returns the buffers if they are more.
    pub fn new(bufs: Vec<B>) -> Result<Self, Vec<B>> {
        if bufs.len() > MAX_BUFFERS {
            return Err(bufs);
        }
        const NONE: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let vectors = vec![NONE; bufs.len()].into();
        Ok(Self { bufs, vectors })
    }

    /// Returns the buffers.
    pub fn into_inner(self) -> Vec<B> {
        self.bufs
    }

    /// Fills the vectors. `bytes` returns the length and the address of a buffer, the address last.
    pub(crate) fn vectors(&mut self, bytes: impl Fn(&mut B) -> (usize, *mut u8)) -> IoMemory {
        let (mut len, mut addresses, mut lengths) = (0, 0, 0);
        for (buf, vector) in self.bufs.iter_mut().zip(&mut self.vectors) {
            let (iov_len, base) = bytes(buf);
            len += iov_len as u64;
            lengths |= iov_len as u64;
            addresses |= base as usize;
            *vector = libc::iovec { iov_base: base.cast(), iov_len };
        }
        let memory = Memory::vectors(self.vectors.len() as u16); // at most MAX_BUFFERS
        IoMemory { memory, ptr: self.vectors.as_mut_ptr().cast(), len, addresses, lengths }
    }
}

impl IoMemory {
    /// The memory of one buffer.
    #[inline]
    pub(crate) fn plain(len: usize, ptr: *mut u8) -> Self {
        let len = len as u64;
        Self { memory: Memory::PLAIN, ptr, len, addresses: ptr as usize, lengths: len }
    }
}

impl<B> Deref for BufList<B> {
    type Target = [B];

    fn deref(&self) -> &[B] {
        &self.bufs
    }
}

impl<B> DerefMut for BufList<B> {
    fn deref_mut(&mut self) -> &mut [B] {
        &mut self.bufs
    }
}

impl<B: fmt::Debug> fmt::Debug for BufList<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.bufs).finish()
    }
}

// SAFETY: code follows the pointers in `vectors` only while a request on the list is in an engine,
// which owns the whole list and stays on its thread. At other times no code follows them.
unsafe impl<B: Send> Send for BufList<B> {}
// SAFETY: `&BufList` gives access only to `bufs`, not to the pointers in `vectors`.
unsafe impl<B: Sync> Sync for BufList<B> {}
