//! Child processes: a closure in a forked child, and this test program run again.

use std::env;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;

/// A guess: a child needs milliseconds.
const SECONDS: u32 = 20;

/// Runs `f` in a child made by `fork`. Returns whether `f` returned true, without a panic and
/// within 20 seconds.
pub fn in_child(f: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls `f` and exits; glibc makes its allocator usable in it.
    in_child_of(|| unsafe { libc::fork() }, f)
}

/// [`in_child`] with another system call in place of `fork`: it returns 0 in the child.
pub fn in_child_of(fork: impl FnOnce() -> libc::pid_t, f: impl FnOnce() -> bool) -> bool {
    let child = fork();
    if child == 0 {
        // SAFETY: sets a timer; its signal ends a child that hangs.
        unsafe { libc::alarm(SECONDS) };
        // An uncaught panic would end this thread, the last one, and the exit status would be 0.
        let held = catch_unwind(AssertUnwindSafe(f)).unwrap_or(false);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!held)) };
    }
    assert!(child > 0, "fork: {}", io::Error::last_os_error());
    drop(f);
    let mut status = 0;
    // SAFETY: `status` is a local variable that outlives the call.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    waited == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// Runs those ignored tests of this test program that have `filter` in their name, one after the
/// other, each for a second, in a process in which glibc registers no rseq area.
///
/// # Panics
///
/// Panics if a test fails there.
pub fn rerun_without_rseq(filter: &str) {
    let status = Command::new(env::current_exe().unwrap())
        .args(["--ignored", "--test-threads=1", filter])
        .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
        .env("OFFLOCK_STRESS_SECONDS", "1")
        .status()
        .unwrap();
    assert!(status.success(), "{filter} without rseq: {status}");
}

#[cfg(test)]
mod tests {
    use std::panic::resume_unwind;

    use super::*;

    #[test]
    fn a_childs_answer_panic_and_end_are_told_apart_from_success() {
        assert!(in_child(|| true));
        assert!(!in_child(|| false));
        // Without the message: another thread may have held the lock of standard error at the fork.
        assert!(!in_child(|| resume_unwind(Box::new(()))));
        // SAFETY: raises a signal that ends the child.
        assert!(!in_child(|| unsafe { libc::raise(libc::SIGKILL) == 0 }));
    }
}
