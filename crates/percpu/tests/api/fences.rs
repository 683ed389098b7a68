//! The asymmetric fences on this kernel: the store-buffer litmus test, and a negative control.

use std::env;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use offlock_percpu::{capabilities, fence};
use testkit::pin::{allowed_cpus, pin_to};
use testkit::stress::{keep_running, stress_time};

/// The number of rounds, and of those in which neither thread saw the other's store.
pub(crate) struct Outcome {
    pub(crate) rounds: u64,
    pub(crate) both_missed: u64,
}

/// Runs rounds of two pinned threads. In each round a thread stores the round number to its own
/// word, runs its fence and loads the other's word. The run ends after `enough` rounds if both
/// threads missed the other's store in `least` of them, and at once if they missed it in `most`.
///
/// It runs for `time`, and longer if it has not done that much by then.
pub(crate) fn store_buffer(
    time: Duration,
    frequent: fn(),
    rare: fn(),
    [least, most]: [u64; 2],
    enough: u64,
) -> Outcome {
    const MISSED: u64 = 0;
    let until = Instant::now() + time;
    let cpus = allowed_cpus();
    let (here, there) = (cpus[0], cpus[1]);

    let line = |()| CachePadded::new(AtomicU64::new(0));
    let (places, seen) = ([(); 2].map(line), [(); 2].map(line));
    let [start, done] = [(); 2].map(line);
    const STOP: u64 = u64::MAX;

    let side = |me: usize, round: u64, fence: fn()| {
        places[me].store(round, Ordering::Relaxed);
        fence();
        let other = places[1 - me].load(Ordering::Relaxed);
        seen[me].store(if other == round { round } else { MISSED }, Ordering::Relaxed);
    };
    thread::scope(|scope| {
        let (start, done, side) = (&start, &done, &side);
        scope.spawn(move || {
            pin_to(&[there]);
            let mut round = 0;
            loop {
                let next = start.load(Ordering::Acquire);
                if next == STOP {
                    break;
                }
                if next != round {
                    round = next;
                    side(1, round, frequent);
                    done.store(round, Ordering::Release);
                }
            }
        });
        pin_to(&[here]);
        let mut outcome = Outcome { rounds: 0, both_missed: 0 };
        let is_enough = |o: &Outcome| o.rounds > enough && o.both_missed >= least;
        while outcome.both_missed < most && keep_running(until, || is_enough(&outcome)) {
            for _ in 0..100 {
                outcome.rounds += 1;
                start.store(outcome.rounds, Ordering::Release);
                for _ in 0..outcome.rounds % 64 {
                    // Starts a little later in each round, so that the threads meet.
                    std::hint::spin_loop();
                }
                side(0, outcome.rounds, rare);
                while done.load(Ordering::Acquire) != outcome.rounds {
                    std::hint::spin_loop();
                }
                let missed = |me: usize| seen[me].load(Ordering::Relaxed) == MISSED;
                outcome.both_missed += u64::from(missed(0) && missed(1));
            }
        }
        start.store(STOP, Ordering::Release);
        outcome
    })
}

/// Each half runs for at most `OFFLOCK_STRESS_SECONDS` (default 2). Two threads must run on two CPUs at
/// once.
#[test]
#[ignore = "stress: seconds on two CPUs"]
fn stress_inv19_light_against_heavy_never_misses_and_without_heavy_does() {
    if allowed_cpus().len() < 2 {
        assert!(env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "the test needs two CPUs");
        return;
    }
    let pair = store_buffer(stress_time(2), fence::light, fence::heavy, [0, 1], 1_000);
    println!("{}: {} rounds of light against heavy", capabilities(), pair.rounds);
    assert!(pair.rounds > 1_000);
    assert_eq!(pair.both_missed, 0, "in {} rounds", pair.rounds);

    // The negative control: without the heavy fence the same rounds see a store buffer.
    let has_membarrier = capabilities().membarrier.is_ok();
    let misses = u64::from(has_membarrier);
    let twin = store_buffer(stress_time(2), fence::light, fence::light, [misses, 10], 0);
    println!("light against light: {} of {} rounds missed", twin.both_missed, twin.rounds);
    assert_eq!(twin.both_missed > 0, has_membarrier, "in {} rounds", twin.rounds);
}
