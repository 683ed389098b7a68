//! The errno of a system call, and the repetition of interrupted calls.

use std::io;

/// Repeats a system call until no signal interrupts it. Returns its result, or the errno.
pub(super) fn uninterrupted(mut call: impl FnMut() -> isize) -> Result<usize, i32> {
    loop {
        if let Ok(done) = usize::try_from(call()) {
            return Ok(done);
        }
        match errno() {
            libc::EINTR => {}
            errno => return Err(errno),
        }
    }
}

/// Returns the errno of the calling thread's last failed system call.
pub(super) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or_default()
}
