//! Locks that keep other programs from writing to an image.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Why a file could not be locked.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Another program holds the lock.
    Locked,
    Os(io::Error),
}

/// Takes an open-file-description lock. A writer's lock is exclusive and covers the whole image. A
/// reader's lock is shared and covers the first 100 bytes only: QEMU's programs lock bytes from 100
/// on to tell each other how they use an image, so they can read it at the same time. The kernel
/// releases the lock with the last descriptor, even if the server is killed.
pub(crate) fn lock(file: &File, read_only: bool, patience: Duration) -> Result<(), LockError> {
    let (kind, len) = if read_only { (libc::F_RDLCK, 100) } else { (libc::F_WRLCK, 0) };
    let start = Instant::now();
    loop {
        let Err(error) = set_lock(file, kind, len) else { return Ok(()) };
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) if start.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Some(libc::EAGAIN | libc::EACCES) => return Err(LockError::Locked),
            _ => return Err(LockError::Os(error)),
        }
    }
}

/// Releases the lock while descriptors of the file are still open.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    set_lock(file, libc::F_UNLCK, 0)
}

fn set_lock(file: &File, kind: i32, len: i64) -> io::Result<()> {
    let range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: len, // 0: to the end of the file, even if it grows
        l_pid: 0,
    };
    // SAFETY: `range` is a complete `struct flock` that outlives the call.
    let ret = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
