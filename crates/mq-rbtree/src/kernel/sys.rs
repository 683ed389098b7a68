//! The errno of a system call, and the repetition of interrupted calls.

use std::io;

/// Repeats a system call until no signal interrupts it. Returns its result, or the errno.
pub(super) fn uninterrupted(mut call: impl FnMut() -> isize) -> Result<usize, i32> {
    loop {
        match result(call()) {
            Err(libc::EINTR) => {}
            done => return done,
        }
    }
}

/// Returns the result of the system call that has just returned, or its errno.
pub(super) fn result(returned: isize) -> Result<usize, i32> {
    usize::try_from(returned).map_err(|_| errno())
}

/// Returns the errno of the calling thread's last failed system call.
pub(super) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or_default()
}
