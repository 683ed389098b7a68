//! What holds in the child of a fork.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A guess: a child needs milliseconds.
const SECONDS: u32 = 20;

/// Runs `f` in a fork child, and tells whether it held, without a panic and in time. No other thread is in
/// percpu's first use at the fork, for which the child would wait for ever.
pub(crate) fn in_child(f: impl FnOnce() -> bool) -> bool {
    let _ = percpu::capabilities();
    // SAFETY: the child calls `f` and exits; glibc makes its allocator usable in it.
    in_child_of(|| unsafe { libc::fork() }, f)
}

/// [`in_child`] of a fork of any kind.
pub(crate) fn in_child_of(fork: impl FnOnce() -> libc::pid_t, f: impl FnOnce() -> bool) -> bool {
    let child = fork();
    if child == 0 {
        // SAFETY: sets a timer; its signal ends a child that hangs.
        unsafe { libc::alarm(SECONDS) };
        // A panic that got away would end this thread, the last one, and that is no failure.
        let held = catch_unwind(AssertUnwindSafe(f)).unwrap_or(false);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!held)) };
    }
    assert!(child > 0, "fork: {}", io::Error::last_os_error());
    drop(f);
    let mut status = 0;
    // SAFETY: `status` is ours.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    waited == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}
