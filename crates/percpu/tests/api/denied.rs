//! A sandbox that refuses `membarrier`: every command, or only those that restart rseq sections.
//!
//! Each case runs in a process of its own. It installs a seccomp filter on the thread of its test
//! before the first use of the crate. The threads that the test starts inherit the filter.

use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use offlock_percpu::{capabilities, fence};

use crate::counters::hop_and_count;
use crate::counts::short_storms;
use crate::fences::store_buffer;
use crate::lglock::hop_and_lock;
use crate::rcu::churn;
use crate::threads::until;
use testkit::child::{in_child, in_own_process};
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

/// Checks what the crate reports and does in a process of its own, under a filter.
fn under_a_filter(test: &str, errno: i32, rseq_only: bool) {
    in_own_process(test, || {
        deny_membarrier(errno, rseq_only);
        let command = libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED;
        // SAFETY: takes numbers and writes no memory of this program.
        let plain = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 };
        assert!(!plain || rseq_only, "the filter is up");

        let all = capabilities();
        let fences = plain && !cfg!(offlock_no_membarrier);
        assert_eq!(all.membarrier.is_ok(), fences, "{all}");
        let off = all.sections.expect_err("sections without a barrier must not run");
        if all.rseq_ids.is_ok() {
            assert_eq!(off, "membarrier cannot restart them", "{all}");
        }
        hop_and_count(until(true));
        hop_and_lock(until(true));
        short_storms();
        churn(Duration::from_millis(300));
        if !fences && allowed_cpus().len() >= 2 {
            let pair = store_buffer(Duration::ZERO, fence::light, fence::light, [0, 1], 20_000);
            assert_eq!(pair.both_missed, 0, "light is a full fence here ({} rounds)", pair.rounds);
        }
    });
}

#[test]
fn inv14_without_membarrier_the_results_are_the_same() {
    let name = "denied::inv14_without_membarrier_the_results_are_the_same";
    under_a_filter(name, libc::EPERM, false);
}

#[test]
fn inv14_on_a_kernel_without_membarrier_the_results_are_the_same() {
    let name = "denied::inv14_on_a_kernel_without_membarrier_the_results_are_the_same";
    under_a_filter(name, libc::ENOSYS, false);
}

/// As on a kernel before 5.10, or in a sandbox that allows only the older commands.
#[test]
fn inv14_without_the_barrier_for_sections_the_results_are_the_same() {
    let name = "denied::inv14_without_the_barrier_for_sections_the_results_are_the_same";
    under_a_filter(name, libc::EINVAL, true);
}

/// A caller that went on would take a fence for one that did not run.
#[test]
fn a_barrier_that_fails_later_aborts_also_without_standard_error() {
    let name = "denied::a_barrier_that_fails_later_aborts_also_without_standard_error";
    let has_membarrier = capabilities().membarrier.is_ok();
    let fail_later = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        // SAFETY: `writer` is open, and no other code uses the number 2 as an owner.
        assert_eq!(unsafe { libc::dup2(writer.as_raw_fd(), 2) }, 2);
        deny_membarrier(libc::EPERM, false);
        fence::heavy();
    };
    if let Some(child) = in_child(name, &[], fail_later) {
        assert_eq!(child.status.signal(), has_membarrier.then_some(libc::SIGABRT), "{child:?}");
    }
}
