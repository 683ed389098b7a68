//! `current_cpu` under migration, on this kernel.
//!
//! Ignored by default: `OFFLOCK_STRESS_SECONDS` (5) says how long each test runs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::{CpuId, capabilities, current_cpu, possible_cpus};

use testkit::pin::{allowed_cpus, pin_to};
use testkit::stress::{keep_running, stress_time};

fn deadline() -> Instant {
    Instant::now() + stress_time(5)
}

fn sched_getcpu() -> usize {
    // SAFETY: takes no arguments and writes no memory of this program.
    let cpu = unsafe { libc::sched_getcpu() };
    cpu.try_into().expect("sched_getcpu works here")
}

/// Four threads pin themselves to one CPU after the other. The id is that CPU until the next pin.
#[test]
#[ignore = "stress: five seconds of hopping"]
fn stress_inv01_current_cpu_agrees_with_sched_getcpu_when_pinned() {
    const ENOUGH: u64 = 10_000;
    let (cpus, until) = (allowed_cpus(), deadline());
    let checked = AtomicU64::new(0);
    thread::scope(|s| {
        for start in 0..4 {
            let (cpus, checked) = (&cpus, &checked);
            s.spawn(move || {
                let on = |_: &&usize| keep_running(until, || checked.load(Relaxed) > ENOUGH);
                for &cpu in cpus.iter().cycle().skip(start).take_while(on) {
                    pin_to(&[cpu]);
                    for _ in 0..50 {
                        let (id, libc_says) = (current_cpu().index(), sched_getcpu());
                        assert_eq!((id, libc_says), (cpu, cpu), "{}", capabilities());
                    }
                    checked.fetch_add(50, Relaxed);
                }
            });
        }
    });
    println!("{}: {checked:?} ids checked on {} CPUs", capabilities(), cpus.len());
    assert!(checked.into_inner() > ENOUGH);
}

/// While the kernel and another thread migrate them, threads see only CPUs that exist, and see
/// every CPU in the end.
#[test]
#[ignore = "stress: five seconds of migrations"]
fn stress_inv01_ids_stay_possible_while_others_move_us() {
    let (cpus, until) = (allowed_cpus(), deadline());
    let stop = AtomicBool::new(false);
    let seen: Vec<AtomicU64> = (0..possible_cpus()).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|s| {
        let (tell, tids) = std::sync::mpsc::channel();
        for _ in 0..4 {
            let (cpus, seen, stop, tell) = (&cpus, &seen, &stop, tell.clone());
            s.spawn(move || {
                // SAFETY: takes no arguments and writes no memory of this program.
                tell.send(unsafe { libc::gettid() }).unwrap();
                while !stop.load(Relaxed) {
                    let cpu: CpuId = current_cpu();
                    assert!(cpus.contains(&cpu.index()), "{cpu}, {}", capabilities());
                    seen[cpu.index()].fetch_add(1, Relaxed);
                }
            });
        }
        let tids: Vec<libc::pid_t> = tids.into_iter().take(4).collect();
        let everywhere = || cpus.iter().all(|&cpu| seen[cpu].load(Relaxed) > 0);
        for &cpu in cpus.iter().cycle().take_while(|_| keep_running(until, everywhere)) {
            for &tid in &tids {
                testkit::pin::pin_thread_to(tid, &[cpu]);
            }
            thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Relaxed);
    });
    for cpu in cpus {
        assert!(seen[cpu].load(Relaxed) > 0, "no thread saw cpu {cpu}");
    }
}
