//! Threads whose start fails with an error where memory is short.

use std::io;

use super::thread;

/// Starts a thread of the given name.
///
/// Allocates. Blocks for the system calls that make a thread.
///
/// # Errors
///
/// The error of the system if it makes no thread, and `ENOMEM` if the process may not map the stack
/// of a thread and 256 KiB beside it. std returns an error for a missing stack only: a new thread
/// that cannot map its signal stack, or allocate its thread-local variables, aborts the process.
/// The check is not exact: other threads may map memory between the check and the start.
pub fn spawn<T, F>(name: String, run: F) -> io::Result<thread::JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    #[cfg(not(offlock_model))]
    check_memory()?;
    thread::Builder::new().name(name).spawn(run)
}

/// Returns `ENOMEM` if the process may not map what the start of a thread takes.
#[cfg(not(offlock_model))]
fn check_memory() -> io::Result<()> {
    /// The default stack of std, and room for what else a start maps; a guess.
    const LEN: usize = (2 << 20) + (256 << 10);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a mapping that the kernel places replaces none.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), LEN, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping was made above, and no reference leads into it.
    unsafe { libc::munmap(at, LEN) };
    Ok(())
}
