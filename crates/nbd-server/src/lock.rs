//! Locks that keep other programs from writing to an image.
//!
//! All locks are open-file-description locks. The kernel releases them with the last descriptor,
//! even if the server is killed.
//!
//! QEMU's programs tell each other by shared locks of single bytes how they use an image. A program
//! that has the permission number N holds byte 100 + N; one that lets no other program have it
//! holds byte 200 + N. Each program takes its locks first and then looks for those of others, so
//! that of two programs that exclude each other at least one is refused.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The byte of QEMU's first permission, and that of its first refusal to share one.
const PERMISSION: i64 = 100;
const NOT_SHARED: i64 = 200;

/// The numbers of QEMU's permissions. QEMU has another one, to write bytes that change nothing,
/// which a reader can let others have.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// The permissions that a reader has, and those that it lets no other program have.
const READS: [i64; 1] = [CONSISTENT_READ];
const EXCLUDES: [i64; 2] = [WRITE, RESIZE];

/// Every byte of a file, even if it grows.
const WHOLE: Range<i64> = 0..i64::MAX;

/// Why a file could not be locked.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Another program holds the lock.
    Locked,
    Os(io::Error),
}

/// Locks an image. A writer's lock is exclusive and covers the whole image, so it excludes QEMU's
/// readers and writers as well as other servers. Readers share an image with each other and with
/// QEMU's readers, and exclude writers.
pub(crate) fn lock(file: &File, read_only: bool, patience: Duration) -> Result<(), LockError> {
    let start = Instant::now();
    loop {
        let locked =
            if read_only { lock_to_read(file) } else { set_lock(file, libc::F_WRLCK, WHOLE) };
        let Err(error) = locked else { return Ok(()) };
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
    set_lock(file, libc::F_UNLCK, WHOLE)
}

/// Takes the locks of QEMU's readers. Holds none of them if it fails.
fn lock_to_read(file: &File) -> io::Result<()> {
    let reads = READS.into_iter().map(|number| PERMISSION + number);
    let excludes = EXCLUDES.into_iter().map(|number| NOT_SHARED + number);
    let take = |byte| set_lock(file, libc::F_RDLCK, byte..byte + 1);
    let taken = reads.chain(excludes).try_for_each(take).and_then(|()| refuse_conflicts(file));
    taken.inspect_err(|_| drop(unlock(file))) // the error says what failed first
}

/// Fails if another program may not be beside a reader: it writes, or lets no other program read.
fn refuse_conflicts(file: &File) -> io::Result<()> {
    let excluded = EXCLUDES.into_iter().map(|number| PERMISSION + number);
    let refused = READS.into_iter().map(|number| NOT_SHARED + number);
    for byte in excluded.chain(refused) {
        let mut range = range(libc::F_WRLCK, byte..byte + 1);
        // SAFETY: `range` is a complete `struct flock` that outlives the call, which writes to it.
        let ret = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
        if ret != 0 {
            return Err(io::Error::last_os_error());
        }
        if i32::from(range.l_type) != libc::F_UNLCK {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
    }
    Ok(())
}

fn set_lock(file: &File, kind: i32, bytes: Range<i64>) -> io::Result<()> {
    let range = range(kind, bytes);
    // SAFETY: `range` is a complete `struct flock` that outlives the call.
    let ret = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn range(kind: i32, bytes: Range<i64>) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start,
        l_len: if bytes == WHOLE { 0 } else { bytes.end - bytes.start }, // 0: to the end
        l_pid: 0,
    }
}
