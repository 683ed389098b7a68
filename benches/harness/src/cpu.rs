//! Pinning, and the CPU time of a thread.

use std::io;
use std::mem;
use std::time::Duration;

fn affinity() -> io::Result<libc::cpu_set_t> {
    // SAFETY: a `cpu_set_t` is an array of integers, for which all-zero bytes are a value.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: the size is that of `set`, which the kernel fills and we own; 0 is this thread.
    let rc = unsafe { libc::sched_getaffinity(0, mem::size_of_val(&set), &mut set) };
    if rc == 0 { Ok(set) } else { Err(io::Error::last_os_error()) }
}

fn set_affinity(set: &libc::cpu_set_t) -> io::Result<()> {
    // SAFETY: the size is that of `set`, which the kernel only reads; 0 is this thread.
    let rc = unsafe { libc::sched_setaffinity(0, mem::size_of_val(set), set) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The CPUs that the calling thread may run on, ascending.
///
/// # Errors
///
/// The errno of `sched_getaffinity`.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = affinity()?;
    // SAFETY: `CPU_ISSET` indexes the words of the set, and every `cpu` is below `CPU_SETSIZE`.
    let isset = |cpu: &usize| unsafe { libc::CPU_ISSET(*cpu, &set) };
    Ok((0..libc::CPU_SETSIZE as usize).filter(isset).collect())
}

/// Keeps the calling thread, and the processes and threads that it starts from now on, on `cpu`.
///
/// # Errors
///
/// `EINVAL` where `cpu` does not exist or is not allowed to this process.
pub fn pin(cpu: usize) -> io::Result<()> {
    pin_to(&[cpu])
}

fn pin_to(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: a `cpu_set_t` is an array of integers, for which all-zero bytes are a value.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for cpu in cpus {
        if *cpu >= libc::CPU_SETSIZE as usize {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: `cpu` is below `CPU_SETSIZE`, checked above.
        unsafe { libc::CPU_SET(*cpu, &mut set) };
    }
    set_affinity(&set)
}

/// Runs `f` on `cpu` and restores the thread's own CPUs afterwards: a process that `f` spawns stays
/// on `cpu`.
///
/// # Errors
///
/// Those of [`pin`]; `f` did not run.
pub fn with_affinity<R>(cpu: usize, f: impl FnOnce() -> R) -> io::Result<R> {
    with_cpus(&[cpu], f)
}

/// Like [`with_affinity`], on any of `cpus`: threads that `f` starts stay on them as well.
///
/// # Errors
///
/// Those of [`pin`], also where `cpus` has none; `f` did not run.
pub fn with_cpus<R>(cpus: &[usize], f: impl FnOnce() -> R) -> io::Result<R> {
    let before = affinity()?;
    pin_to(cpus)?;
    let result = f();
    set_affinity(&before)?;
    Ok(result)
}

/// The CPU time that the calling thread has used: it stands still while the thread waits for a CPU.
///
/// # Panics
///
/// Panics if the kernel has no `CLOCK_THREAD_CPUTIME_ID`; every Linux has.
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours and writable.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(rc, 0, "clock_gettime: {}", io::Error::last_os_error());
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Asks the kernel to kill the calling process when the thread that started it ends: for
/// `Command::pre_exec`, so that a bench killed outright leaves no server behind.
///
/// # Errors
///
/// The errno of `prctl`.
pub(crate) fn die_with_parent() -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory of ours.
    let rc = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
