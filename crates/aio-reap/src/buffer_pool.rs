//! Pools of buffers that are registered with the kernel.
//!
//! # Invariants
//!
//! 1. Each index below `count` is in `free` or in exactly one `PoolBuf`. Only that `PoolBuf`
//!    reaches the `size` bytes at `index * stride`.

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

/// Buffers start at pages, which suffices for `O_DIRECT` on every known device.
const ALIGN: usize = 4096;

/// A pool of buffers of one size, allocated together and registered with io_uring, so that the
/// kernel does not look up and pin their pages for each request.
///
/// On other backends, or if the system refuses the registration (`RLIMIT_MEMLOCK`, kernels before
/// 5.19, more than 32 pools), the buffers work unregistered, and [`refusal`](Self::refusal) returns
/// the reason. Every engine of this thread can use the buffers. They are registered only with the
/// engine that the pool was made for.
///
/// Clones are cheap and share the buffers.
///
/// ```
/// use aio_reap::{BufferPool, Engine};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let pool = BufferPool::new(&engine, 8, 4096)?;
/// let mut buf = pool.checkout().expect("a buffer is free");
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

/// The state that a pool and its buffers share.
struct Pool {
    memory: NonNull<u8>,
    /// The distance in bytes from one buffer to the next.
    stride: usize,
    size: usize,
    count: usize,
    free: RefCell<Vec<u32>>,
    registration: Result<Registration, io::Error>,
    /// The owner of the allocation at `memory`, which is accessed only through that pointer.
    _owner: AlignedBuf,
}

/// A buffer of a [`BufferPool`]. The drop returns it to the pool.
///
/// ```
/// use aio_reap::{BufferPool, Engine};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let pool = BufferPool::new(&engine, 2, 4096)?;
/// let mut buf = pool.checkout().expect("a buffer is free");
/// buf.set_len(512);
/// buf.fill(7);
/// assert_eq!((buf.len(), buf.capacity(), pool.available()), (512, 4096, 1));
/// # Ok(())
/// # }
/// ```
pub struct PoolBuf {
    pool: Rc<Pool>,
    index: u32,
    len: usize,
}

impl BufferPool {
    /// Allocates `count` zeroed buffers of `size` bytes, each at the start of a page.
    ///
    /// # Errors
    ///
    /// `EINVAL` if `count` or `size` is zero, `ENOMEM` if there is not enough memory. A refused
    /// registration is not an error.
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

    /// Takes a buffer of the full size, with the bytes of its last use. Returns `None` if every
    /// buffer is taken.
    pub fn checkout(&self) -> Option<PoolBuf> {
        let index = self.0.free.borrow_mut().pop()?;
        Some(PoolBuf { pool: Rc::clone(&self.0), index, len: self.0.size })
    }

    /// Returns the number of buffers that are not taken.
    pub fn available(&self) -> usize {
        self.0.free.borrow().len()
    }

    /// Returns the number of all buffers.
    pub fn count(&self) -> usize {
        self.0.count
    }

    /// Returns the size of one buffer in bytes.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Returns the reason why the buffers are not registered, or `None` if they are.
    pub fn refusal(&self) -> Option<&io::Error> {
        self.0.registration.as_ref().err()
    }
}

impl PoolBuf {
    /// Returns the largest length that [`set_len`](Self::set_len) accepts: the buffer size of the
    /// pool.
    pub fn capacity(&self) -> usize {
        self.pool.size
    }

    /// Changes the length in bytes, up to [`capacity`](Self::capacity). The bytes stay.
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
        // SAFETY: by invariant 1 only this buffer reaches the `size >= len` bytes at `start`, which
        // were zeroed when the pool was made.
        unsafe { slice::from_raw_parts(self.start(), self.len) }
    }
}

impl DerefMut for PoolBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: by invariant 1 only this buffer reaches the `size >= len` initialised bytes at
        // `start`, and `&mut self` is exclusive.
        unsafe { slice::from_raw_parts_mut(self.start(), self.len) }
    }
}

impl Drop for PoolBuf {
    fn drop(&mut self) {
        self.pool.free.borrow_mut().push(self.index);
    }
}

// SAFETY: the bytes are initialised and stay in the pool's allocation, which lives as long as this
// buffer. By invariant 1 no other buffer reaches them.
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

// SAFETY: the conditions of `IoBuf` hold for a `PoolBuf`, and the pool's memory was allocated for
// writing.
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
