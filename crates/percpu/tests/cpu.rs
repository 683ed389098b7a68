//! `current_cpu` on the real kernel: threads without an id, a changed cpuset, rseq switched off.

mod common;

use std::env;
use std::process::Command;
use std::thread;

use percpu::{RseqState, Source, backend, current_cpu, topology};

use common::{allowed_cpus, pin_to};

/// On every CPU we may use, in turn: the id, the source, and the slot agree with where we are.
fn check_while_pinned() {
    for cpu in allowed_cpus() {
        pin_to(&[cpu]);
        for _ in 0..100 {
            let here = current_cpu();
            assert!(here.index() < topology().capacity());
            if backend().source() != Source::ThreadSlot {
                assert_eq!(here.get() as usize, cpu, "{}", backend());
            }
        }
    }
}

#[test]
fn inv01_a_changed_cpuset_moves_the_id_and_never_past_capacity() {
    thread::spawn(check_while_pinned).join().unwrap();
}

/// A thread whose area the kernel no longer fills: its `cpu_id` reads -1, as in a thread that
/// libc did not make.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(offlock_portable)))]
#[test]
fn inv01_a_thread_whose_id_is_minus_one_falls_back() {
    if backend().rseq() != RseqState::InUse {
        return; // the whole process is on the fallback: `check_while_pinned` is the test
    }
    thread::spawn(|| {
        let _ = current_cpu();
        let id = unregister_rseq();
        assert_eq!(id, -1, "the kernel says that this thread has no id");
        assert_eq!(backend().source(), Source::Rseq, "the other threads keep theirs");
        check_while_pinned();
    })
    .join()
    .unwrap();
}

/// Gives the calling thread's rseq area back to the kernel, and returns the id it then holds.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(offlock_portable)))]
fn unregister_rseq() -> i32 {
    use std::arch::asm;
    use std::io;

    const UNREGISTER: libc::c_int = 1; // RSEQ_FLAG_UNREGISTER
    const SIGNATURE: u32 = 0x5305_3053; // what glibc registers with on x86
    const SYMBOL: &std::ffi::CStr = c"__rseq_offset";

    // SAFETY: looks up a name; null if nobody exports it.
    let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SYMBOL.as_ptr()) };
    assert!(!offset.is_null(), "called only where rseq is in use");
    // SAFETY: libc's `const ptrdiff_t`, written before `main`.
    let offset = unsafe { *offset.cast::<isize>() };
    let thread_pointer: usize;
    // SAFETY: the first word of a thread's control block points to itself (x86_64 ABI).
    unsafe { asm!("mov {}, fs:[0]", out(reg) thread_pointer, options(nostack, readonly)) };
    let area = thread_pointer.wrapping_add_signed(offset);

    // glibc registers 32 bytes up to 2.39, and from 2.40 on what the kernel asks for in AT_RSEQ.
    const AT_RSEQ_FEATURE_SIZE: u64 = 27;
    // SAFETY: reads an entry of the auxiliary vector; 0 if there is none.
    let kernel = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) };
    for size in [32, kernel.next_multiple_of(32)] {
        // SAFETY: the kernel forgets the area; nothing in this thread is inside a section.
        let rc = unsafe { libc::syscall(libc::SYS_rseq, area, size as u32, UNREGISTER, SIGNATURE) };
        if rc == 0 {
            let cpu_id = (area + 4) as *const i32;
            // SAFETY: the area stays allocated as long as the thread; `volatile` because the
            // kernel wrote it behind the compiler's back.
            return unsafe { cpu_id.read_volatile() };
        }
    }
    panic!("no size of area was accepted: {}", io::Error::last_os_error());
}

/// Run by the test below, in a process with rseq switched off.
#[test]
#[ignore = "a child of inv14_with_rseq_switched_off_the_answers_are_the_same"]
fn child_with_rseq_switched_off() {
    if env::var_os("OFFLOCK_CHILD").is_none() {
        return;
    }
    let backend = backend();
    println!("backend: {backend}");
    assert_ne!(backend.rseq(), RseqState::InUse);
    assert_eq!(backend.source(), Source::GetCpu);
    check_while_pinned();
}

#[test]
fn inv14_with_rseq_switched_off_the_answers_are_the_same() {
    check_in_this_process();
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child_with_rseq_switched_off", "--ignored", "--nocapture"])
        .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
        .env("OFFLOCK_CHILD", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    let reason = backend_without_rseq();
    assert!(said.contains(&format!("CPU id from sched_getcpu; rseq {reason}")), "{said}");
}

/// The same checks here, in whichever mode this process was started.
fn check_in_this_process() {
    thread::spawn(check_while_pinned).join().unwrap();
}

/// What the child must give as its reason.
fn backend_without_rseq() -> RseqState {
    match backend().rseq() {
        RseqState::InUse => RseqState::NotRegistered,
        already_off => already_off,
    }
}

#[cfg(offlock_portable)]
#[test]
fn inv14_the_portable_build_says_so() {
    assert_eq!(backend().rseq(), RseqState::NotBuilt);
    assert_eq!(backend().source(), Source::GetCpu);
}
