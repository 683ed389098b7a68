//! Threads that move between CPUs, for the stress tests.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng::{self, Rng};
use testkit::stress::{keep_running, stress_time};

/// Runs `f` on several threads until the time is over or one of them panics. `f` gets the number of
/// its thread, and random numbers. The threads move between CPUs between the calls. Returns the
/// number of calls.
pub(crate) fn storm(
    threads: usize,
    enough: impl Fn(u64) -> bool + Sync,
    f: impl Fn(usize, &mut Rng) + Sync,
) -> u64 {
    storm_on(&allowed_cpus(), threads, enough, f)
}

/// Runs [`storm`] on the given CPUs.
pub(crate) fn storm_on(
    cpus: &[usize],
    threads: usize,
    enough: impl Fn(u64) -> bool + Sync,
    f: impl Fn(usize, &mut Rng) + Sync,
) -> u64 {
    /// Stops all threads, also after a panic of one.
    struct Stop<'a>(&'a AtomicBool);

    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    let until = Instant::now() + stress_time(3);
    let stop = AtomicBool::new(false);
    let calls = AtomicU64::new(0);
    thread::scope(|scope| {
        for me in 0..threads {
            let (f, enough, stop, calls) = (&f, &enough, &stop, &calls);
            scope.spawn(move || {
                let stop = Stop(stop);
                let mut rng = rng::seeded(me as u64);
                let on = || keep_running(until, || enough(calls.load(Relaxed)));
                while !stop.0.load(Relaxed) && on() {
                    pin_to(&[cpus[rng.usize(..cpus.len())]]);
                    // A call takes up to a second on a busy machine.
                    let mut made = 0;
                    while made == 0 || (made < 32 && Instant::now() < until) {
                        f(me, &mut rng);
                        made += 1;
                    }
                    calls.fetch_add(made, Relaxed);
                }
            });
        }
    });
    let calls = calls.into_inner();
    println!("{calls} calls; {}", offlock_percpu::capabilities());
    calls
}
