//! Sections on this kernel, interrupted by preemption, signals, migrations and barriers, beside the
//! same instructions without a section.
//!
//! The negative control runs the code under test on a fake rseq area. The kernel does not know this
//! area and restarts nothing, so updates must be lost.
//!
//! Each test runs for `OFFLOCK_STRESS_SECONDS` (default 2).

use std::env;
use std::hint;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use offlock_sync::atomic::{AtomicBool, AtomicU64, Ordering};
use testkit::pin::{allowed_cpus, pin_thread_to};
use testkit::signals::{ThreadTimer, handle};
use testkit::stress::{keep_running, stress_time};

use super::self_test::getcpu;
use super::{Refused, Sections, arch, sections as found, state};
use crate::fence;
use crate::words::Words;

const THREADS: usize = 8;

/// Iterations that the long section spins between its load and its store: about a microsecond.
const SPIN: u32 = 2_000;

fn deadline() -> Instant {
    Instant::now() + stress_time(2)
}

/// Returns the distance from the thread pointer to a fake rseq area of the calling thread, which the
/// kernel does not know. Its id is the CPU where the thread was when it first asked.
pub(super) fn fake_area() -> isize {
    #[repr(C, align(32))]
    struct Fake([u32; 8]);
    thread_local! {
        static FAKE: Fake = Fake([0, getcpu(), 0, 0, 0, 0, 0, 0]); // the second is `cpu_id`
    }
    let at = FAKE.with(|fake| ptr::from_ref(&fake.0).addr());
    at.wrapping_sub(arch::thread_pointer()) as isize
}

/// Returns parameters with which the same code runs without a section.
fn unprotected(real: Sections) -> Sections {
    Sections { area: fake_area(), ..real }
}

/// Nominal, in CPU time of the thread. The test counts the signals that each thread takes.
const SIGNAL_INTERVAL: Duration = Duration::from_micros(50);

/// The least number of signals that each worker must take per second of the test: a 400th of the nominal
/// number, since the eight workers share the CPUs of the machine, which may be emulated.
const SIGNALS_PER_SECOND: u64 = 50;

thread_local! {
    // Nothing to drop, and a `const` value, so a signal handler may use it at any moment.
    static SIGNALS: AtomicU64 = const { AtomicU64::new(0) };
}

extern "C" fn count(_: libc::c_int) {
    // Ordering: Relaxed, both; only this thread uses the counter.
    SIGNALS.with(|n| n.store(n.load(Ordering::Relaxed) + 1, Ordering::Relaxed));
}

/// Calls `work` while signals arrive. Returns its result and the number of signals.
fn signalled<R>(work: impl FnOnce() -> R) -> (R, u64) {
    handle(count);
    let _timer = ThreadTimer::start(SIGNAL_INTERVAL);
    let result = work();
    (result, SIGNALS.with(|n| n.load(Ordering::Relaxed)))
}

/// Runs `work` on eight threads under signals to each thread, migrations and barriers. Returns the
/// sum of the results. If a thread took too few signals in that time, runs again with new threads.
fn disturbed(until: Instant, work: impl Fn(&AtomicBool) -> u64 + Sync) -> u64 {
    let time = until.saturating_duration_since(Instant::now()).as_secs_f64().round();
    let wanted = SIGNALS_PER_SECOND * time as u64;
    let (mut sum, mut signals) = (0, [0; THREADS]);
    let enough = |signals: &[u64; THREADS]| signals.iter().all(|&got| got >= wanted);
    while keep_running(until, || enough(&signals)) {
        sum += disturb(until.max(Instant::now() + Duration::from_secs(1)), &work, &mut signals);
    }
    println!("signals taken by each thread for {time} s: {signals:?}");
    assert!(enough(&signals), "too few signals reached a thread: the test proves nothing");
    sum
}

/// Runs `work` once on eight threads, and adds the number of signals of each to `signals`.
fn disturb(
    until: Instant,
    work: impl Fn(&AtomicBool) -> u64 + Sync,
    signals: &mut [u64; THREADS],
) -> u64 {
    let stop = AtomicBool::new(false);
    let (sender, tids) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let (work, stop) = (&work, &stop);
        let workers: Vec<_> = (0..THREADS)
            .map(|_| {
                let sender = sender.clone();
                scope.spawn(move || {
                    // SAFETY: takes no arguments and writes no memory of this program.
                    sender.send(unsafe { libc::gettid() }).unwrap();
                    signalled(|| work(stop))
                })
            })
            .collect();
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                fence::heavy_rseq();
                thread::sleep(Duration::from_micros(20));
            }
        });
        let tids: Vec<_> = tids.iter().take(THREADS).collect();
        for (turn, &cpu) in allowed_cpus().iter().cycle().enumerate() {
            if Instant::now() >= until {
                break;
            }
            pin_thread_to(tids[turn % THREADS], &[cpu]);
            pin_thread_to(tids[(turn * 5 + 1) % THREADS], &[cpu]);
            thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        let mut sum = 0;
        for (worker, signals) in workers.into_iter().zip(signals) {
            let (result, got) = worker.join().unwrap();
            sum += result;
            *signals += got;
        }
        sum
    })
}

fn sum(words: &Words) -> u64 {
    words.iter().fold(0, |sum, word| sum.wrapping_add(word.load(Ordering::Relaxed)))
}

/// Returns whether this process was started, or built, without sections on purpose.
fn switched_off() -> bool {
    let tunables = env::var("GLIBC_TUNABLES").unwrap_or_default();
    cfg!(offlock_no_membarrier) || tunables.split(':').any(|t| t == "glibc.pthread.rseq=0")
}

/// Returns false if no sections run. Panics if the environment requires them, so that CI cannot pass
/// without a test.
pub(super) fn sections_run() -> bool {
    if let Err(why) = state() {
        println!("sections are off: {why}: nothing to test");
        let wanted = env::var_os("OFFLOCK_REQUIRE_ALL").is_some() && !switched_off();
        assert!(!wanted, "OFFLOCK_REQUIRE_ALL is set and no sections run");
        return false;
    }
    true
}

fn sections() -> Option<Sections> {
    sections_run().then(|| found().expect("sections run"))
}

#[test]
#[ignore = "stress: seconds of signals, migrations and barriers"]
fn stress_inv12_disturbed_section_adds_the_same_as_its_atomic_twin() {
    let Some(real) = sections() else { return };
    let (open, words, twin) = (AtomicU64::new(0), Words::new().unwrap(), AtomicU64::new(0));
    let aborts = disturbed(deadline(), |stop| {
        let (mut aborts, mut n) = (0, 0_u64);
        while !stop.load(Ordering::Relaxed) {
            n += 1;
            aborts += real.long_add(&open, &words, n, SPIN).unwrap() - 1;
            twin.fetch_add(n, Ordering::Relaxed);
        }
        aborts
    });
    assert_eq!(sum(&words), twin.into_inner(), "after {aborts} aborts");
    println!("{aborts} aborts, no update lost");
    assert!(aborts > 0, "no section was aborted: the test proves nothing");
}

/// The negative control of `stress_inv12_disturbed_section_adds_the_same_as_its_atomic_twin`.
#[test]
#[ignore = "stress: seconds of signals, migrations and barriers"]
fn stress_inv12_same_code_without_a_section_loses_updates() {
    let Some(real) = sections() else { return };
    let (open, words, twin) = (AtomicU64::new(0), Words::new().unwrap(), AtomicU64::new(0));
    let calls = disturbed(deadline(), |stop| {
        let mut calls = 0;
        while !stop.load(Ordering::Relaxed) {
            calls += 1;
            unprotected(real).long_add(&open, &words, 1, SPIN).unwrap();
            twin.fetch_add(1, Ordering::Relaxed);
        }
        calls
    });
    let lost = twin.into_inner() - sum(&words);
    println!("{lost} of {calls} updates lost without a section");
    assert!(lost > 0, "the disturbance is too weak to prove anything");
}

/// All sections at once, each compared with the number of rounds.
#[test]
#[ignore = "stress: seconds of signals, migrations and barriers"]
fn stress_inv12_every_section_agrees_with_atomics() {
    let Some(real) = sections() else { return };
    let (open, open_at_7) = (AtomicU64::new(0), AtomicU64::new(7 << 40));
    let [adds, counts] = [(); 2].map(|()| Words::new().unwrap());
    let rounds = disturbed(deadline(), |stop| {
        let mut rounds = 0;
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..50 {
                rounds += 1;
                real.add(Some((&open, 0)), &adds, 3).unwrap();
                real.add(Some((&open_at_7, 7 << 40)), &adds, 5).unwrap();
                assert_eq!(real.add(Some((&open_at_7, 7)), &adds, 1), Err(Refused::Closed));
                real.add(None, &counts, 7).unwrap();
            }
        }
        rounds
    });
    assert_eq!(sum(&adds), 8 * rounds);
    assert_eq!(sum(&counts), 7 * rounds);
    println!("{rounds} rounds");
}

/// Closes the gate repeatedly while long sections run. Returns how often a word changed after the
/// barrier; with sections it never does.
fn changes_after_barrier(real: Sections, protect: bool) -> u64 {
    let (gate, words, adds) = (AtomicU64::new(0), Words::new().unwrap(), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    let until = deadline();
    let mut changed = 0;
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let ops = if protect { real } else { unprotected(real) };
                    match ops.long_add(&gate, &words, 1, SPIN) {
                        Ok(_) => _ = adds.fetch_add(1, Ordering::Relaxed),
                        Err(_) => thread::yield_now(),
                    }
                }
            });
        }
        while keep_running(until, || protect || changed > 0) {
            gate.store(1, Ordering::Relaxed);
            fence::heavy_rseq();
            let before = sum(&words);
            for _ in 0..2_000 {
                hint::spin_loop();
            }
            thread::yield_now(); // threads that were preempted inside a section run now
            changed += u64::from(sum(&words) != before);
            gate.store(0, Ordering::Relaxed);
            thread::sleep(Duration::from_micros(50));
        }
        stop.store(true, Ordering::Relaxed);
    });
    if protect {
        assert_eq!(sum(&words), adds.into_inner());
    }
    changed
}

#[test]
#[ignore = "stress: seconds of closing the gate"]
fn stress_inv13_no_section_commits_after_its_gate_was_closed() {
    let Some(real) = sections() else { return };
    assert_eq!(changes_after_barrier(real, true), 0);
    let control = changes_after_barrier(real, false);
    println!("without a section, {control} late commits");
    assert!(control > 0, "the control saw no late commit: the test proves nothing");
}
