//! The CPUs of the process, and the affinity of a thread.

use std::io;
use std::mem;
use std::process;

/// Returns the CPUs that the process may run on.
///
/// They are those of its first thread: it may be called on a thread that is pinned itself.
pub fn allowed_cpus() -> Vec<usize> {
    // The id of the process is that of its first thread.
    cpus_of(process::id().cast_signed())
}

/// Returns the CPUs that the thread `tid` may run on; 0 is the calling thread.
pub fn cpus_of(tid: libc::pid_t) -> Vec<usize> {
    // SAFETY: plain bytes, of which zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: the kernel writes at most the given size, which is that of `set`.
    let rc = unsafe { libc::sched_getaffinity(tid, mem::size_of_val(&set), &mut set) };
    assert_eq!(rc, 0, "sched_getaffinity: {}", io::Error::last_os_error());
    let is_in = |cpu: &usize| {
        // SAFETY: `cpu` is less than the size of the set.
        unsafe { libc::CPU_ISSET(*cpu, &set) }
    };
    (0..libc::CPU_SETSIZE as usize).filter(is_in).collect()
}

/// Returns the CPU that the calling thread runs on.
pub fn current_cpu() -> usize {
    // SAFETY: has no preconditions.
    let cpu = unsafe { libc::sched_getcpu() };
    cpu.try_into().unwrap_or_else(|_| panic!("sched_getcpu: {}", io::Error::last_os_error()))
}

/// Restricts the calling thread to `cpus`; it runs on one of them when this returns.
pub fn pin_to(cpus: &[usize]) {
    pin_thread_to(0, cpus);
}

/// Runs `f` on `cpu`, and lets the calling thread run on every CPU of the process again.
pub fn on<R>(cpu: usize, f: impl FnOnce() -> R) -> R {
    pin_to(&[cpu]);
    let result = f();
    pin_to(&allowed_cpus());
    result
}

/// Restricts the thread `tid` to `cpus`; 0 is the calling thread.
pub fn pin_thread_to(tid: libc::pid_t, cpus: &[usize]) {
    // SAFETY: plain bytes, of which zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for &cpu in cpus {
        assert!(cpu < libc::CPU_SETSIZE as usize);
        // SAFETY: `cpu` was just checked against the size of the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is initialised, and its size is the one given.
    let rc = unsafe { libc::sched_setaffinity(tid, mem::size_of_val(&set), &set) };
    assert_eq!(rc, 0, "sched_setaffinity: {}", io::Error::last_os_error());
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_pinned_thread_runs_there_and_still_sees_the_processs_cpus() {
        let cpus = allowed_cpus();
        assert!(!cpus.is_empty());
        thread::spawn(move || {
            for &cpu in &cpus {
                pin_to(&[cpu]);
                assert_eq!(current_cpu(), cpu);
                assert_eq!(allowed_cpus(), cpus);
            }
        })
        .join()
        .unwrap();
    }
}
