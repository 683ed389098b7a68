//! Pinning, and the CPU time of a thread.

use std::io;
use std::time::Duration;

pub use testkit::pin::allowed_cpus;
use testkit::pin::{cpus_of, pin_to};

/// Keeps the calling thread, and the processes and threads that it starts from now on, on `cpu`.
pub fn pin(cpu: usize) {
    pin_to(&[cpu]);
}

/// Runs `f` on any of `cpus`, where the processes and threads that it starts stay, and gives the calling thread
/// its own CPUs back afterwards.
pub fn with_cpus<R>(cpus: &[usize], f: impl FnOnce() -> R) -> R {
    let before = cpus_of(0);
    pin_to(cpus);
    let result = f();
    pin_to(&before);
    result
}

/// The CPU time that the calling thread has used: it stands still while the thread waits for a CPU.
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours and writable.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(rc, 0, "clock_gettime: {}", io::Error::last_os_error());
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Asks the kernel to kill the calling process when the thread that started it ends: for
/// `Command::pre_exec`, so that a bench killed outright leaves no server behind.
pub(crate) fn die_with_parent() -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory of ours.
    let rc = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
