//! `current_cpu` on the real kernel: threads without an id, a changed cpuset, rseq switched off.

use std::env;
use std::process::Command;
use std::thread;

use offlock_percpu::{PerCpuCounter, capabilities, current_cpu, possible_cpus};

use crate::no_id::take_id;
use testkit::child::{CHILD, in_own_process};
use testkit::pin::{allowed_cpus, pin_to};

/// Pins this thread to each allowed CPU, and checks the id, its source and the slot.
fn check_while_pinned() {
    for cpu in allowed_cpus() {
        pin_to(&[cpu]);
        for _ in 0..100 {
            let here = current_cpu();
            assert!(here.index() < possible_cpus());
            assert_eq!(here.get() as usize, cpu, "{}", capabilities());
        }
    }
}

#[test]
fn inv01_a_changed_cpuset_moves_the_id_and_never_past_capacity() {
    thread::spawn(check_while_pinned).join().unwrap();
}

/// The kernel does not update the area of this thread. Its `cpu_id` is -1, as in a thread that libc
/// did not create.
#[test]
fn inv01_a_thread_whose_id_is_minus_one_falls_back() {
    if capabilities().rseq_ids.is_err() {
        return; // the whole process uses the fallback, which `check_while_pinned` tests
    }
    thread::spawn(|| {
        let _ = current_cpu();
        assert_eq!(take_id(), Some(-1), "the kernel says that this thread has no id");
        assert_eq!(capabilities().rseq_ids, Ok(()), "the other threads keep their ids");
        check_while_pinned();
    })
    .join()
    .unwrap();
}

/// Run by the test below, in a process with rseq switched off.
#[test]
#[ignore = "a child of inv14_with_rseq_switched_off_the_answers_are_the_same"]
fn child_with_rseq_switched_off() {
    if env::var_os("OFFLOCK_CHILD").is_none() {
        return;
    }
    println!("{}", capabilities());
    check_while_pinned();
}

#[test]
fn inv14_with_rseq_switched_off_the_answers_are_the_same() {
    check_in_this_process();
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "cpu::child_with_rseq_switched_off", "--ignored", "--nocapture"])
        .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
        .env("OFFLOCK_CHILD", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    let reason = capabilities().rseq_ids.err().unwrap_or("not registered by libc");
    assert!(said.contains(&format!("rseq ids off: {reason}")), "{said}");
}

/// Runs the checks in the mode in which this process was started.
fn check_in_this_process() {
    thread::spawn(check_while_pinned).join().unwrap();
}

/// The first use of a process may be on a thread that libc did not create. The sections of the other
/// threads stay on.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_env = "gnu"))]
#[test]
fn inv14_a_first_use_without_an_id_leaves_sections_on() {
    if env::var_os(CHILD).is_none() && capabilities().sections.is_err() {
        return;
    }
    in_own_process("cpu::inv14_a_first_use_without_an_id_leaves_sections_on", || {
        let first_use = || {
            assert_eq!(testkit::rseq::unregister(), -1);
            PerCpuCounter::new().increment();
        };
        thread::spawn(first_use).join().unwrap();
        assert_eq!(capabilities().sections, Ok(()));
    });
}

#[cfg(offlock_portable)]
#[test]
fn inv14_the_portable_build_says_so() {
    assert_eq!(capabilities().rseq_ids, Err("not in this build"));
    assert!(capabilities().sections.is_err());
}
