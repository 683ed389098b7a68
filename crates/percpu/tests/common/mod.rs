//! What the tests on the real kernel share: affinity.

use std::io;
use std::mem;

/// The CPUs that this process may run on.
pub(crate) fn allowed_cpus() -> Vec<usize> {
    let list = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = list.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let list: percpu::CpuList = list.parse().unwrap();
    list.iter().map(percpu::CpuId::index).collect()
}

/// Lets the calling thread run on `cpus` only; it does when this returns.
pub(crate) fn pin_to(cpus: &[usize]) {
    pin_thread_to(0, cpus);
}

/// Lets the thread `tid` run on `cpus` only; 0 is the calling thread.
pub(crate) fn pin_thread_to(tid: libc::pid_t, cpus: &[usize]) {
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
