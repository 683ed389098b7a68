//! Buffers of one size that the kernel knows beforehand.
//!
//! # Invariants
//!
//! 1. Each index below the count is in `free` or in exactly one `PoolBuf`, which alone reaches the
//!    bytes from `index * size` on.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;
use std::slice;

use crate::buf::{AlignedBuf, IoBuf, IoBufMut, Registered};
use crate::engine::Engine;
use crate::registry::Registration;

/// Buffers start on pages, which suits `O_DIRECT` on every device we know.
const ALIGN: usize = 4096;

/// Buffers of one size, allocated together and registered with io_uring, which then need not look
/// up and pin their pages for each request.
///
/// On other backends, or where the system refuses the registration (`RLIMIT_MEMLOCK`, kernels
/// before 5.19, more than 32 pools), the same buffers work unregistered;
/// [`refusal`](Self::refusal) says why. They serve any engine of this thread, registered only with
/// the one the pool was made for.
///
/// Cheap to clone: clones share the buffers.
///
/// ```
/// use aio_reap::{BufferPool, Engine};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let pool = BufferPool::new(&engine, 8, 4096)?;
/// let mut buf = pool.checkout().expect("nobody has any");
/// buf.fill(7);
/// let (written, buf) = engine.write(&file, buf, 0).submit()?.wait();
/// assert_eq!((written?, pool.available()), (4096, 7));
/// drop(buf);
/// assert_eq!(pool.available(), 8);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct BufferPool(Rc<Pool>);

struct Pool {
    memory: NonNull<u8>,
    /// Bytes from one buffer to the next.
    stride: usize,
    size: usize,
    count: usize,
    free: RefCell<Vec<u32>>,
    registration: Result<Registration, io::Error>,
    /// Owns `memory`; only reached through the pointer.
    _owner: AlignedBuf,
}

/// A buffer of a [`BufferPool`]; dropping it gives it back.
pub struct PoolBuf {
    pool: Rc<Pool>,
    index: u32,
    len: usize,
}

impl BufferPool {
    /// `count` zeroed buffers of `size` bytes, each at the start of a page.
    ///
    /// # Errors
    ///
    /// `EINVAL` when `count` or `size` is zero, `ENOMEM` when there is not that much memory. A
    /// refused registration is no error.
    pub fn new(engine: &Engine, count: usize, size: usize) -> io::Result<Self> {
        let error = io::Error::from_raw_os_error;
        if count == 0 || size == 0 {
            return Err(error(libc::EINVAL));
        }
        let total = size.checked_next_multiple_of(ALIGN).and_then(|stride| {
            let within = u32::try_from(count).is_ok();
            Some((stride, stride.checked_mul(count).filter(|_| within)?))
        });
        let (stride, total) = total.ok_or_else(|| error(libc::ENOMEM))?;
        let mut owner = AlignedBuf::try_zeroed(total, ALIGN).ok_or_else(|| error(libc::ENOMEM))?;
        let memory = NonNull::new(owner.as_mut_ptr()).expect("an allocation is not null");
        let registration = engine.core().register_buffer(memory, total);
        let free = RefCell::new((0..count as u32).rev().collect());
        let pool = Pool { memory, stride, size, count, free, registration, _owner: owner };
        Ok(Self(Rc::new(pool)))
    }

    /// A buffer of the full size, with whatever its last user left in it; `None` when all are out.
    pub fn checkout(&self) -> Option<PoolBuf> {
        let index = self.0.free.borrow_mut().pop()?;
        Some(PoolBuf { pool: Rc::clone(&self.0), index, len: self.0.size })
    }

    /// Buffers that nobody has.
    pub fn available(&self) -> usize {
        self.0.free.borrow().len()
    }

    /// Buffers in all.
    pub fn count(&self) -> usize {
        self.0.count
    }

    /// Bytes of one buffer.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Why the kernel does not know the buffers; `None` if it does.
    pub fn refusal(&self) -> Option<&io::Error> {
        self.0.registration.as_ref().err()
    }
}

impl PoolBuf {
    /// The most bytes [`set_len`](Self::set_len) accepts: the pool's size.
    pub fn capacity(&self) -> usize {
        self.pool.size
    }

    /// Changes the length; the bytes stay.
    ///
    /// # Panics
    ///
    /// Panics if `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "length {len} exceeds capacity {}", self.capacity());
        self.len = len;
    }

    fn start(&self) -> *mut u8 {
        self.pool.memory.as_ptr().wrapping_add(self.index as usize * self.pool.stride)
    }
}

impl Deref for PoolBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: invariant 1: `size >= len` bytes, zeroed at birth, that only we reach.
        unsafe { slice::from_raw_parts(self.start(), self.len) }
    }
}

impl DerefMut for PoolBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` is exclusive.
        unsafe { slice::from_raw_parts_mut(self.start(), self.len) }
    }
}

impl Drop for PoolBuf {
    fn drop(&mut self) {
        self.pool.free.borrow_mut().push(self.index);
    }
}

// SAFETY: the bytes stay where the pool put them, which lives as long as we; they are initialised
// and by invariant 1 ours alone.
unsafe impl IoBuf for PoolBuf {
    fn as_ptr(&self) -> *const u8 {
        self.start()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn registered(&self) -> Option<Registered<'_>> {
        self.pool.registration.as_ref().ok().map(Registered::new)
    }
}

// SAFETY: as above.
unsafe impl IoBufMut for PoolBuf {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start()
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("count", &self.count())
            .field("size", &self.size())
            .field("available", &self.available())
            .field("refusal", &self.refusal())
            .finish()
    }
}

impl fmt::Debug for PoolBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuf").field("index", &self.index).field("len", &self.len).finish()
    }
}
