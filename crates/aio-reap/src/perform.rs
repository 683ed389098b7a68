//! Operations by blocking system calls, for the backends without a kernel interface of their own.

use crate::op::{Kind, MemoryKind, Op};
use crate::sys;

/// Performs `op` with the blocking system call; a count, or a negated errno as the kernel's
/// rings report it.
///
/// # Safety
///
/// The buffer of `op` is valid for `op.len` bytes (writable for a read) and its descriptor is
/// open for the length of the call.
pub(crate) unsafe fn perform(op: &Op) -> i32 {
    let (fd, len, offset) = (op.fd, op.len, op.offset as libc::off_t);
    let ret = match op.kind {
        Kind::Nop => 0,
        Kind::Read | Kind::Write => {
            // SAFETY: the caller vouches for the buffers.
            return unsafe { transfer(op) };
        }
        // SAFETY: no pointers.
        Kind::Fsync => unsafe { libc::fsync(fd).into() },
        // SAFETY: no pointers.
        Kind::Fdatasync => unsafe { libc::fdatasync(fd).into() },
        Kind::Reserve | Kind::PunchHole | Kind::ZeroRange => {
            let flags = op.kind.fallocate_flags().unwrap_or(0);
            // SAFETY: no pointers.
            unsafe { libc::fallocate(fd, flags, offset, len as libc::off_t).into() }
        }
        Kind::WillNeed => {
            // SAFETY: no pointers.
            let errno = unsafe {
                libc::posix_fadvise(fd, offset, len as libc::off_t, libc::POSIX_FADV_WILLNEED)
            };
            return -errno; // it returns the error instead of setting errno
        }
    };
    outcome(ret)
}

/// Reads or writes, as [`perform`] does.
///
/// # Safety
///
/// As for [`perform`].
unsafe fn transfer(op: &Op) -> i32 {
    let (fd, len, offset) = (op.fd, op.len as usize, op.offset as libc::off_t);
    let write = op.kind == Kind::Write;
    let moved = match op.memory.kind() {
        MemoryKind::Vectors(count) => {
            let (vectors, count) = (op.ptr.cast::<libc::iovec>(), libc::c_int::from(count));
            if write {
                // SAFETY: the caller vouches for the vectors and what they name.
                unsafe { libc::pwritev(fd, vectors, count, offset) }
            } else {
                // SAFETY: as above.
                unsafe { libc::preadv(fd, vectors, count, offset) }
            }
        }
        // SAFETY: the caller vouches for the buffer.
        _ if write => unsafe { libc::pwrite(fd, op.ptr.cast(), len, offset) },
        // SAFETY: as above.
        _ => unsafe { libc::pread(fd, op.ptr.cast(), len, offset) },
    };
    outcome(moved as i64)
}

/// A count, or a negated errno, of a system call's return value.
fn outcome(ret: i64) -> i32 {
    match sys::check(ret) {
        Ok(count) => count as i32, // at most MAX_RW_COUNT, which Linux never exceeds
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}
