//! `current_cpu` on the real kernel: threads without an id, a changed cpuset, migrations, rseq switched off.

use std::env;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use offlock_percpu::{PerCpuCounter, capabilities, current_cpu, possible_cpus};

use crate::threads::{hop, take_id, until};
use testkit::child::{CHILD, in_child, in_own_process};
use testkit::pin::{allowed_cpus, pin_thread_to, pin_to};
use testkit::stress::keep_running;

/// Checks the id of a thread that is pinned to a CPU.
fn check_on(cpu: usize) {
    for _ in 0..50 {
        let here = current_cpu();
        assert!(here.index() < possible_cpus());
        assert_eq!(here.get() as usize, cpu, "{}", capabilities());
    }
}

/// Pins a thread to each allowed CPU, and checks its id and its slot. Returns the id that the kernel
/// leaves behind if the thread has none.
fn check_while_pinned(id: bool) -> Option<i32> {
    let check = move || {
        let left = (!id).then(take_id).flatten();
        for cpu in allowed_cpus() {
            pin_to(&[cpu]);
            check_on(cpu);
        }
        left
    };
    thread::spawn(check).join().unwrap()
}

#[test]
fn inv01_a_changed_cpuset_moves_the_id_and_never_past_capacity() {
    check_while_pinned(true);
}

/// The kernel does not update the area of the thread. Its `cpu_id` is -1, as in a thread that libc
/// did not create. Without rseq the whole process uses the fallback.
#[test]
fn inv01_a_thread_whose_id_is_minus_one_falls_back() {
    let ids = capabilities().rseq_ids;
    assert_eq!(check_while_pinned(false), ids.ok().map(|()| -1));
    assert_eq!(capabilities().rseq_ids, ids, "the other threads keep their ids");
}

#[test]
fn inv14_with_rseq_switched_off_the_answers_are_the_same() {
    let name = "cpu::inv14_with_rseq_switched_off_the_answers_are_the_same";
    let check = || {
        println!("{}", capabilities());
        check_while_pinned(true);
    };
    let Some(child) = in_child(name, &[("GLIBC_TUNABLES", "glibc.pthread.rseq=0")], check) else {
        return;
    };
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    let reason = capabilities().rseq_ids.err().unwrap_or("not registered by libc");
    assert!(said.contains(&format!("rseq ids off: {reason}")), "{said}");
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

/// Threads pin themselves to one CPU after the other. The id is that CPU until the next pin.
#[test]
#[ignore = "stress: five seconds of hopping"]
fn stress_inv01_current_cpu_is_the_cpu_that_a_thread_is_pinned_to() {
    let (until, checked) = (until(false), AtomicU64::new(0));
    let enough = || checked.load(Relaxed) > 10_000;
    let check = |_: &mut _, cpu| {
        check_on(cpu);
        checked.fetch_add(50, Relaxed);
    };
    hop(4, || keep_running(until, enough), check, || ());
    println!("{}: {checked:?} ids checked", capabilities());
    assert!(enough());
}

/// While the kernel and another thread migrate them, threads see only CPUs that exist, and see
/// every CPU in the end.
#[test]
#[ignore = "stress: five seconds of migrations"]
fn stress_inv01_ids_stay_possible_while_others_move_us() {
    let (cpus, until, stop) = (&allowed_cpus(), until(false), &AtomicBool::new(false));
    let seen: &Vec<_> = &(0..possible_cpus()).map(|_| AtomicU64::new(0)).collect();
    let everywhere = || cpus.iter().all(|&cpu| seen[cpu].load(Relaxed) > 0);
    thread::scope(|s| {
        let (tell, tids) = mpsc::channel();
        for _ in 0..4 {
            let tell = tell.clone();
            s.spawn(move || {
                // SAFETY: takes no arguments and writes no memory of this program.
                tell.send(unsafe { libc::gettid() }).unwrap();
                while !stop.load(Relaxed) {
                    let cpu = current_cpu();
                    assert!(cpus.contains(&cpu.index()), "{cpu}, {}", capabilities());
                    seen[cpu.index()].fetch_add(1, Relaxed);
                }
            });
        }
        let tids: Vec<libc::pid_t> = tids.into_iter().take(4).collect();
        for &cpu in cpus.iter().cycle().take_while(|_| keep_running(until, everywhere)) {
            tids.iter().for_each(|&tid| pin_thread_to(tid, &[cpu]));
            thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Relaxed);
    });
    assert!(everywhere(), "{seen:?}");
}
