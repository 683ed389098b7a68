//! One operation of the kernel on a file, without the front end that asked for it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use crate::sys;

/// The maximum number of bytes that Linux moves in one call (`MAX_RW_COUNT`, ABI). Longer requests
/// are continued as short transfers.
pub(crate) const MAX_TRANSFER: usize = 0x7fff_f000;

/// The size of `struct statx` (ABI).
pub(crate) const STATX_BYTES: usize = 256;
/// The fields that every request asks for.
pub(crate) const STATX_MASK: u32 =
    libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_SIZE | libc::STATX_BLOCKS;

/// The way [`Engine::allocate`](crate::Engine::allocate) changes a range of a file
/// (`fallocate(2)`).
///
/// ```
/// use aio_reap::{AllocateMode, Engine};
/// use std::fs;
/// use std::os::fd::AsFd;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// engine.allocate(&file, AllocateMode::Reserve, 0, 1 << 16).submit()?.wait().0?;
/// let size = fs::File::from(file.as_fd().try_clone_to_owned()?).metadata()?.len();
/// assert_eq!(size, 1 << 16);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllocateMode {
    /// Reserve space for the range. The contents stay, and the file grows if the range ends past
    /// its end.
    Reserve,
    /// Return the range to the file system. It reads as zeros. The file's size stays.
    PunchHole,
    /// Make the range read as zeros and keep its space. The file grows if the range ends past its
    /// end.
    ZeroRange,
}

impl AllocateMode {
    /// Returns the flags of the `fallocate`.
    pub(crate) fn flags(self) -> i32 {
        match self {
            Self::Reserve => 0,
            Self::PunchHole => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            Self::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
        }
    }
}

/// The kind of an operation. Transfers, the most frequent ones, come first, so that
/// [`Op::transfers`] is one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Nop,
    Fsync,
    Fdatasync,
    Allocate(AllocateMode),
    /// `openat`. `ptr` is the path and `len` the flags and the mode, see [`Op::on_path`].
    Open,
    /// `statx`. `ptr` is the path, `offset` the address of the result, `len` the flags.
    Statx,
    /// `close`. Linux closes the descriptor whatever the result is.
    Close,
}

impl Kind {
    /// Returns whether the operation opens, closes or names files.
    pub(crate) fn manages_files(self) -> bool {
        matches!(self, Self::Open | Self::Statx | Self::Close)
    }
}

/// The memory that an operation's pointer names: the bytes of one buffer (or none), or a number of
/// `struct iovec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory(u16);

impl Memory {
    pub(crate) const PLAIN: Self = Self(0);
    const VECTORS: u16 = 1 << 15;

    pub(crate) fn vectors(count: u16) -> Self {
        debug_assert!(count < Self::VECTORS);
        Self(Self::VECTORS | count)
    }

    /// Returns the number of vectors, or `None` for the bytes of one buffer.
    #[inline]
    pub(crate) fn vector_count(self) -> Option<u16> {
        self.is_vectors().then_some(self.0 & !Self::VECTORS)
    }

    #[inline]
    pub(crate) fn is_vectors(self) -> bool {
        self.0 & Self::VECTORS != 0
    }
}

/// The block size of transfers of a file opened with `O_DIRECT`, stored as the binary logarithm of
/// its bytes plus one. 0 for any other file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block(u8);

impl Block {
    pub(crate) const NONE: Self = Self(0);

    #[inline]
    pub(crate) fn of(direct: Option<Alignment>) -> Self {
        direct.map_or(Self::NONE, |align| Self(align.offset.trailing_zeros() as u8 + 1))
    }

    #[inline]
    pub(crate) fn is_direct(self) -> bool {
        self != Self::NONE
    }

    /// Returns how many of the `bytes` of a short transfer count as moved. A direct file can be
    /// continued only at the start of a block, so a partial block is transferred again.
    pub(crate) fn whole(self, bytes: u64) -> u64 {
        if self.is_direct() { bytes >> (self.0 - 1) << (self.0 - 1) } else { bytes }
    }
}

/// One operation as a backend sees it. It has addresses and owns nothing: the slot that it came
/// from keeps the buffer and the file alive until the completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) block: Block,
    pub(crate) memory: Memory,
    /// A descriptor, or `AT_FDCWD`.
    pub(crate) fd: RawFd,
    /// The start of the buffer or of the vectors; null for operations without either.
    pub(crate) ptr: *mut u8,
    /// The length in bytes of the buffers, or of the range of a `fallocate`.
    pub(crate) len: u64,
    pub(crate) offset: u64,
}

impl Op {
    pub(crate) const NOP: Self = Self {
        kind: Kind::Nop,
        block: Block::NONE,
        memory: Memory::PLAIN,
        fd: 0,
        ptr: std::ptr::null_mut(),
        len: 0,
        offset: 0,
    };

    /// Returns a copy that is made field by field, so that the fields stay in registers. A copy of the
    /// whole would load several narrow stores at once, which waits until they have reached the cache.
    #[inline(always)]
    pub(crate) fn by_fields(&self) -> Self {
        let Self { kind, block, memory, fd, ptr, len, offset } = *self;
        Self { kind, block, memory, fd, ptr, len, offset }
    }

    /// Makes an operation on a path, relative to the directory `fd`. `mode` is that of an `openat`.
    pub(crate) fn on_path(kind: Kind, fd: RawFd, path: *mut u8, flags: i32, mode: u32) -> Self {
        debug_assert!(kind.manages_files());
        let len = u64::from(flags as u32) | u64::from(mode) << 32;
        Self { kind, fd, ptr: path, len, ..Self::NOP }
    }

    /// Returns the flags of an operation on a path.
    pub(crate) fn flags(&self) -> libc::c_int {
        debug_assert!(self.kind.manages_files());
        self.len as u32 as libc::c_int
    }

    /// Returns the mode of an `openat`.
    pub(crate) fn mode(&self) -> libc::mode_t {
        debug_assert_eq!(self.kind, Kind::Open);
        (self.len >> 32) as libc::mode_t
    }

    /// Returns the address at which a `statx` stores its result.
    pub(crate) fn stat_address(&self) -> *mut u8 {
        debug_assert_eq!(self.kind, Kind::Statx);
        std::ptr::with_exposed_provenance_mut(self.offset as usize)
    }

    /// Returns whether the operation moves bytes between a buffer and the file.
    #[inline]
    pub(crate) fn transfers(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Write)
    }

    /// Returns the operation that is left after `done` bytes, cut to the limit of one system call.
    /// Vectors must have [advanced](Self::advance) by `done`. They are not cut, because the kernel
    /// cuts them itself.
    #[inline]
    pub(crate) fn rest(&self, done: u64) -> Op {
        let mut rest = *self;
        if self.transfers() {
            debug_assert!(done <= self.len);
            rest.len = self.len - done;
            rest.offset = self.offset.wrapping_add(done);
            if !self.memory.is_vectors() {
                // `done <= len`, so the result is inside the buffer or one past its end.
                rest.ptr = self.ptr.wrapping_add(done as usize);
                rest.len = rest.len.min(MAX_TRANSFER as u64);
            }
        }
        rest
    }

    /// Moves the vectors `bytes` forward: skips those that are used up and shortens the next one.
    ///
    /// # Safety
    ///
    /// The vectors, if there are any, are valid, and the kernel no longer uses them.
    pub(crate) unsafe fn advance(&mut self, mut bytes: u64) {
        let Some(mut count) = self.memory.vector_count() else { return };
        let mut first = self.ptr.cast::<libc::iovec>();
        while count > 0 {
            // SAFETY: by the contract of this function the vectors are valid and unused, and at
            // least one of the `count` that start at `first` is left.
            let vector = unsafe { &mut *first };
            let inside = bytes.min(vector.iov_len as u64);
            bytes -= inside;
            if inside == vector.iov_len as u64 {
                first = first.wrapping_add(1);
                count -= 1;
                continue;
            }
            vector.iov_base = vector.iov_base.wrapping_byte_add(inside as usize);
            vector.iov_len -= inside as usize;
            break;
        }
        self.ptr = first.cast();
        self.memory = Memory::vectors(count);
    }

    /// Zeroes the bytes of its buffers that a read which moved `done` bytes did not fill.
    ///
    /// # Safety
    ///
    /// The buffers are valid for writing, the kernel no longer uses them, and vectors have
    /// [advanced](Self::advance) by `done`.
    pub(crate) unsafe fn zero_rest(&self, done: u64) {
        debug_assert_eq!(self.kind, Kind::Read);
        let Some(count) = self.memory.vector_count() else {
            let start = self.ptr.wrapping_add(done as usize);
            // SAFETY: by the contract of this function the buffer is valid for writing; `len -
            // done` of its bytes start at `start`.
            unsafe { start.write_bytes(0, (self.len - done) as usize) };
            return;
        };
        for nth in 0..usize::from(count) {
            let vector = self.ptr.cast::<libc::iovec>().wrapping_add(nth);
            // SAFETY: `nth` is below the count, so this is one of the vectors.
            let vector = unsafe { *vector };
            // SAFETY: by the contract of this function a vector names a buffer, or the end of one,
            // that is valid for writing.
            unsafe { vector.iov_base.cast::<u8>().write_bytes(0, vector.iov_len) };
        }
    }
}

/// The alignment that a file opened with `O_DIRECT` requires of requests, in bytes. Both numbers
/// are powers of two.
///
/// ```
/// use aio_reap::{AlignedBuf, Alignment, Engine};
/// use std::fs::File;
///
/// # fn main() -> std::io::Result<()> {
/// let file = File::open("/etc/os-release")?;
/// assert_eq!(Alignment::of(&file)?, None); // not opened with O_DIRECT
/// # use std::os::unix::fs::OpenOptionsExt;
/// # let open = File::options().read(true).custom_flags(0o40000).open("/etc/os-release");
/// # let Ok(file) = open else { return Ok(()) };
/// if let Some(align) = Alignment::of(&file)? {
///     let len = 4096_u32.next_multiple_of(align.offset) as usize;
///     let buf = AlignedBuf::zeroed(len, align.memory as usize);
///     let engine = Engine::new()?;
///     engine.read(&engine.attach(file)?, buf, 0).submit()?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Alignment {
    /// The alignment of the buffer's address.
    pub memory: u32,
    /// The alignment of the offset and the length.
    pub offset: u32,
}

impl Alignment {
    /// Returns the alignment that the open file `fd` requires, or `None` if it was not opened with
    /// `O_DIRECT`.
    ///
    /// # Errors
    ///
    /// Returns the error of `fcntl` if the flags cannot be read.
    pub fn of(fd: impl AsFd) -> io::Result<Option<Self>> {
        let fd = fd.as_fd();
        // SAFETY: `F_GETFL` takes no pointer, and `fd` is open while it is borrowed.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
        let flags = sys::check(flags.into())? as i32;
        Ok((flags & libc::O_DIRECT != 0).then(|| Self::ask(fd)))
    }

    /// Returns whether a multiple of `address` is aligned for a buffer, and one of `bytes` for
    /// offsets and lengths.
    ///
    /// Several addresses, or an offset and several lengths, may be passed ored together.
    #[inline]
    pub(crate) fn accepts(self, address: usize, bytes: u64) -> bool {
        address.is_multiple_of(self.memory as usize) && bytes.is_multiple_of(self.offset.into())
    }

    /// Asks `statx` (Linux 6.1), then the sector size of a block device. If neither answers, the
    /// result is 512 bytes, the smallest block of any Linux file system; the kernel refuses a
    /// request that needs more.
    fn ask(fd: BorrowedFd<'_>) -> Self {
        let (memory, offset) = sys::direct_alignment(fd).unwrap_or_default();
        if memory.is_power_of_two() && offset.is_power_of_two() {
            return Self { memory, offset };
        }
        let mut sector: libc::c_int = 0;
        // SAFETY: BLKSSZGET stores one int in `sector`. On other files it fails and stores nothing.
        let ret = unsafe { libc::ioctl(fd.as_raw_fd(), libc::BLKSSZGET, &raw mut sector) };
        let sector = if ret == 0 && sector > 0 { sector as u32 } else { 512 };
        Self { memory: sector, offset: sector }
    }
}

/// A request for the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sub {
    pub(crate) user_data: u64,
    pub(crate) op: Op,
}

/// A completion. `result` is a number of bytes or a negated errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawCompletion {
    /// The number of the request.
    pub user_data: u64,
    /// A number of bytes or a negated errno.
    pub result: i32,
}

/// The reason why a submission ended before its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The kernel has no room now (EAGAIN, EBUSY). The engine tries again after a completion or a
    /// delay.
    Busy,
    /// The kernel refused the first request that it did not accept, with this errno.
    Failed(i32),
}

/// The result of a submission. `stop` is `None` if the whole batch was accepted.
#[derive(Clone, Copy, Debug)]
pub struct Submitted {
    /// The number of requests that the kernel took.
    pub accepted: usize,
    /// Why it took no more.
    pub stop: Option<Stop>,
}

// Performs operations by blocking system calls, for the backends without an asynchronous
// interface.

/// Performs `op` by its blocking system call. Returns a count or a negated errno, as the kernel's
/// rings report it.
///
/// # Safety
///
/// Until the call returns, the buffer of `op` is valid for `op.len` bytes (for a read: writable),
/// and its descriptor is open. Paths end with a zero byte, and `op.offset` of a `statx` is the
/// address of [`STATX_BYTES`] writable bytes.
pub(crate) unsafe fn perform(op: &Op) -> i32 {
    let (fd, len, offset) = (op.fd, op.len, op.offset as libc::off_t);
    let ret = match op.kind {
        Kind::Nop => 0,
        Kind::Read | Kind::Write => {
            // SAFETY: the contract of this function is that of `transfer`.
            return unsafe { transfer(op) };
        }
        // SAFETY: the call takes no pointer.
        Kind::Fsync => unsafe { libc::fsync(fd).into() },
        // SAFETY: the call takes no pointer.
        Kind::Fdatasync => unsafe { libc::fdatasync(fd).into() },
        // SAFETY: the call takes no pointer.
        Kind::Allocate(mode) => unsafe {
            libc::fallocate(fd, mode.flags(), offset, len as libc::off_t).into()
        },
        Kind::Open => {
            let (path, mode) = (op.ptr.cast_const().cast(), op.mode());
            // SAFETY: by the contract of this function the path is valid and ends.
            unsafe { libc::openat(fd, path, op.flags(), mode).into() }
        }
        // SAFETY: by the contract of this function the path is valid and ends, and the kernel may
        // store 256 bytes at the address.
        Kind::Statx => unsafe {
            sys::statx(fd, op.ptr.cast(), op.flags(), STATX_MASK, op.stat_address())
        },
        // SAFETY: the call takes no pointer; the request owns the descriptor.
        Kind::Close => unsafe { libc::close(fd).into() },
    };
    outcome(ret)
}

/// Performs a read or a write.
///
/// # Safety
///
/// Those of [`perform`].
unsafe fn transfer(op: &Op) -> i32 {
    let plain = libc::iovec { iov_base: op.ptr.cast(), iov_len: op.len as usize };
    let (vectors, count) = match op.memory.vector_count() {
        Some(count) => (op.ptr.cast::<libc::iovec>().cast_const(), count.into()),
        None => (&raw const plain, 1),
    };
    let (fd, offset) = (op.fd, op.offset as libc::off_t);
    let moved = if op.kind == Kind::Write {
        // SAFETY: by the contract of this function the vectors are valid, and so are the buffers that
        // they name.
        unsafe { libc::pwritev(fd, vectors, count, offset) }
    } else {
        // SAFETY: by the contract of this function the memory is valid for writing.
        unsafe { libc::preadv(fd, vectors, count, offset) }
    };
    outcome(moved as i64)
}

/// Converts a system call's return value to a count or a negated errno.
fn outcome(ret: i64) -> i32 {
    match sys::check(ret) {
        Ok(count) => count as i32, // at most MAX_RW_COUNT, which Linux never exceeds
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

const _: () = assert!(size_of::<Op>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_system_call_has_a_limit() {
        let huge = Op { kind: Kind::Read, len: 3 << 30, ..Op::NOP };
        assert_eq!(huge.rest(0).len, 0x7fff_f000);
    }
}
