//! Threads without a CPU id, and on changing CPUs.

use std::thread;
use std::time::{Duration, Instant};

use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng::{self, Rng};
use testkit::stress::stress_time;

/// Unregisters this thread's rseq area, if rseq is in use, like in a thread that libc did not create.
/// Returns the CPU id that the area then holds.
pub(crate) fn take_id() -> Option<i32> {
    #[cfg(all(
        any(target_arch = "x86_64", target_arch = "aarch64"),
        target_env = "gnu",
        not(offlock_portable)
    ))]
    if offlock_percpu::capabilities().rseq_ids.is_ok() {
        return Some(testkit::rseq::unregister());
    }
    None
}

/// Returns the end of a test that is short, or as long as a stress test.
pub(crate) fn until(is_short: bool) -> Instant {
    let time = if is_short { Duration::from_millis(300) } else { stress_time(5) };
    Instant::now() + time
}

/// Calls `step` in `threads` threads for as long as `go` returns true, each time on a CPU to which it
/// pins the thread. Every second thread has no CPU id. Returns what `meanwhile` returns here.
pub(crate) fn hop<R>(
    threads: u64,
    go: impl Fn() -> bool + Sync,
    step: impl Fn(&mut Rng, usize) + Sync,
    meanwhile: impl FnOnce() -> R,
) -> R {
    let (cpus, go, step) = (&allowed_cpus(), &go, &step);
    thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                if thread % 2 == 1 {
                    take_id();
                }
                let mut rng = rng::seeded(thread);
                while go() {
                    let cpu = cpus[rng.usize(..cpus.len())];
                    pin_to(&[cpu]);
                    step(&mut rng, cpu);
                }
            });
        }
        meanwhile()
    })
}
