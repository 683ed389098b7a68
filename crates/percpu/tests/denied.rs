//! A sandbox that refuses `membarrier`: every command, or only those that restart rseq sections.
//!
//! Each case runs in a process of its own. It installs a seccomp filter on the thread of its test
//! before the first use of the crate. The threads that the test starts inherit the filter.

#[path = "common/store_buffer.rs"]
mod store_buffer;

use std::env;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use offlock_percpu::fence;
use offlock_percpu::{LgLock, PerCpuCounter, PercpuRef, capabilities, rcu};

use store_buffer::store_buffer;
use testkit::pin::allowed_cpus;

/// Installs a filter that refuses `membarrier` with `errno`; with `rseq_only`, only the two
/// commands that restart sections.
fn deny_membarrier(errno: i32, rseq_only: bool) {
    // linux/bpf_common.h, linux/seccomp.h
    const LOAD: u16 = 0x20; // a 32-bit word at an offset of `seccomp_data`
    const IF_EQUAL: u16 = 0x15;
    const IF_ANY_BIT: u16 = 0x45;
    const RETURN: u16 = 0x06;
    const NUMBER: u32 = 0;
    const FIRST_ARGUMENT: u32 = if cfg!(target_endian = "little") { 16 } else { 20 };
    const RSEQ_COMMANDS: u32 = 1 << 7 | 1 << 8;

    let at = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let commands = if rseq_only { RSEQ_COMMANDS } else { u32::MAX };
    let mut filter = [
        at(LOAD, NUMBER, 0, 0),
        at(IF_EQUAL, libc::SYS_membarrier as u32, 0, 3),
        at(LOAD, FIRST_ARGUMENT, 0, 0),
        at(IF_ANY_BIT, commands, 0, 1),
        at(RETURN, libc::SECCOMP_RET_ERRNO | errno as u32, 0, 0),
        at(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: takes numbers and accesses no memory.
    let rc = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(rc, 0);
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: `program` and the filter it points to live until the kernel has copied them.
    let rc = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &program) };
    assert_eq!(rc, 0, "seccomp: {}", std::io::Error::last_os_error());
}

/// Returns whether the calling thread may use the plain membarrier.
fn membarrier_works() -> bool {
    let command = libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED;
    // SAFETY: takes numbers and writes no memory of this program.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// The child of the tests below.
#[test]
#[ignore = "a child of the other tests"]
fn child_under_a_filter() {
    let Ok(case) = env::var("OFFLOCK_DENIED") else { return };
    let (errno, rseq_only) = match &case[..] {
        "EPERM" => (libc::EPERM, false),
        "ENOSYS" => (libc::ENOSYS, false),
        "EINVAL, rseq only" => (libc::EINVAL, true),
        other => panic!("no case {other}"),
    };
    deny_membarrier(errno, rseq_only);
    let plain = membarrier_works();
    assert!(!plain || rseq_only, "the filter is up");

    let all = capabilities();
    println!("{all}");
    let fences = plain && !cfg!(offlock_no_membarrier);
    assert_eq!(all.membarrier.is_ok(), fences, "{all}");
    let off = all.sections.expect_err("sections without a barrier must not run");
    if all.rseq_ids.is_ok() && cfg!(not(offlock_virtual_cpu)) {
        assert_eq!(off, "membarrier cannot restart them", "{all}");
    }
    everything_counts();
    if !fences && allowed_cpus().len() >= 2 {
        let pair = store_buffer(Duration::ZERO, fence::light, fence::light, [0, 1], 20_000);
        assert_eq!(pair.both_missed, 0, "light is a full fence here ({} rounds)", pair.rounds);
    }
    println!("all right under the filter");
}

/// Uses each structure on four threads, and checks that the results are exact.
fn everything_counts() {
    const ROUNDS: u64 = 2_000;
    let counter = PerCpuCounter::new();
    let lock = LgLock::new(|_| 0_u64);
    let config = rcu::Atomic::new([0_u64; 2]);
    let object = PercpuRef::new(|| ());
    thread::scope(|scope| {
        for thread in 0..4 {
            let (counter, object) = (&counter, &object);
            let (lock, config) = (&lock, &config);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    counter.add(3);
                    *lock.local().unwrap() += 1;
                    drop(object.try_get().expect("not killed"));
                    let guard = rcu::pin();
                    let seen = config.load(&guard);
                    assert_eq!(seen[0], seen[1], "freed under a reader");
                    drop(guard);
                    if thread == 0 && round % 20 == 0 {
                        config.store(rcu::Owned::new([round; 2]));
                        drop(lock.global().unwrap());
                    }
                }
            });
        }
    });
    assert_eq!(counter.sum(), 4 * 3 * ROUNDS as i64);
    let sum: u64 = lock.global().unwrap().iter().map(|(_, n)| *n).sum();
    assert_eq!(sum, 4 * ROUNDS);
    object.kill().unwrap();
    assert!(object.is_zero());
    rcu::synchronize().unwrap();
}

fn run(child: &str, case: &str) -> Output {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", child, "--ignored", "--nocapture"])
        .env("OFFLOCK_DENIED", case)
        .output()
        .unwrap()
}

fn in_process(case: &str) {
    let child = run("child_under_a_filter", case);
    let said = String::from_utf8_lossy(&child.stdout);
    let good = child.status.success() && said.contains("all right under the filter");
    assert!(good, "{case}: {said}{}", String::from_utf8_lossy(&child.stderr));
}

#[test]
fn inv14_without_membarrier_the_results_are_the_same() {
    in_process("EPERM");
    in_process("ENOSYS");
}

/// As on a kernel before 5.10, or in a sandbox that allows only the older commands.
#[test]
fn inv14_without_the_barrier_for_sections_the_results_are_the_same() {
    in_process("EINVAL, rseq only");
}

/// The child of the test below. Its standard error is a pipe without a reader.
#[test]
#[ignore = "a child of the other tests"]
fn child_under_a_late_filter() {
    if env::var_os("OFFLOCK_DENIED").is_none() || capabilities().membarrier.is_err() {
        return;
    }
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    // SAFETY: `writer` is open, and no other code uses the number 2 as an owner.
    assert_eq!(unsafe { libc::dup2(writer.as_raw_fd(), 2) }, 2);
    deny_membarrier(libc::EPERM, false);
    fence::heavy();
}

/// A caller that went on would take a fence for one that did not run.
#[test]
fn a_barrier_that_fails_later_aborts_also_without_standard_error() {
    let child = run("child_under_a_late_filter", "late");
    let aborts = capabilities().membarrier.is_ok();
    assert_eq!(child.status.signal(), aborts.then_some(libc::SIGABRT), "{child:?}");
}
