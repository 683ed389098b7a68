//! Performs operations by blocking system calls, for the backends without an asynchronous
//! interface.

use crate::op::{Kind, Op};
use crate::statx::STATX_MASK;
use crate::sys;

/// Performs `op` by its blocking system call. Returns a count or a negated errno, as the kernel's
/// rings report it.
///
/// # Safety
///
/// Until the call returns, the buffer of `op` is valid for `op.len` bytes (for a read: writable),
/// and its descriptor is open. Paths end with a zero byte, and `op.offset` of a `statx` is the
/// address of [`STATX_WORDS`](crate::statx::STATX_WORDS) writable words.
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
        Kind::Reserve | Kind::PunchHole | Kind::ZeroRange => {
            let flags = op.kind.fallocate_flags().unwrap_or(0);
            // SAFETY: the call takes no pointer.
            unsafe { libc::fallocate(fd, flags, offset, len as libc::off_t).into() }
        }
        Kind::WillNeed => {
            // SAFETY: the call takes no pointer.
            let errno = unsafe {
                libc::posix_fadvise(fd, offset, len as libc::off_t, libc::POSIX_FADV_WILLNEED)
            };
            return -errno; // it returns the error and does not set errno
        }
        Kind::Open => {
            let (path, mode) = (op.ptr.cast_const().cast(), op.mode());
            // SAFETY: by the contract of this function the path is valid and ends.
            unsafe { libc::openat(fd, path, op.flags(), mode).into() }
        }
        // By its number, because older versions of musl have no `statx`.
        // SAFETY: by the contract of this function the path is valid and ends, and the kernel may
        // store 256 bytes at the address.
        Kind::Statx => unsafe {
            let (flags, result) = (op.flags(), op.stat_address());
            libc::syscall(libc::SYS_statx, fd, op.ptr, flags, STATX_MASK, result)
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
    let (fd, len, offset) = (op.fd, op.len as usize, op.offset as libc::off_t);
    let write = op.kind == Kind::Write;
    let moved = match op.memory.vector_count() {
        Some(count) => {
            let (vectors, count) = (op.ptr.cast::<libc::iovec>(), libc::c_int::from(count));
            if write {
                // SAFETY: by the contract of this function the vectors are valid, and so are the
                // buffers that they name.
                unsafe { libc::pwritev(fd, vectors, count, offset) }
            } else {
                // SAFETY: by the contract of this function the memory is valid for writing.
                unsafe { libc::preadv(fd, vectors, count, offset) }
            }
        }
        // SAFETY: by the contract of this function the buffer has `len` bytes.
        _ if write => unsafe { libc::pwrite(fd, op.ptr.cast(), len, offset) },
        // SAFETY: by the contract of this function the memory is valid for writing.
        _ => unsafe { libc::pread(fd, op.ptr.cast(), len, offset) },
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
