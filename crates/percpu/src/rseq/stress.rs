//! The sections on this kernel, interrupted in every way there is, beside the same instructions
//! without a section.
//!
//! The negative control runs the very code under test on a made-up rseq area: the kernel does not
//! know it, so nothing is restarted, and updates must be lost.
//!
//! `OFFLOCK_STRESS_SECONDS` (2) says how long each test runs.

use std::env;
use std::hint;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use super::{Armed, armed, usable};
use crate::cpu::getcpu;
use crate::fence;
use crate::rseq::operations::{Operations, Refused};
use crate::rseq::section;
use crate::rseq::state::Sections;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::words::Words;
use testkit::pin::{allowed_cpus, pin_thread_to};
use testkit::signals::{ThreadTimer, handle};
use testkit::stress::{keep_running, stress_time};

const THREADS: usize = 8;

/// How long the long section spins between its load and its store: about a microsecond.
const SPIN: u32 = 2_000;

fn deadline() -> Instant {
    Instant::now() + stress_time(2)
}

/// A made-up rseq area, laid out like the kernel's.
#[repr(C, align(32))]
struct Fake {
    cpu_id_start: u32,
    cpu_id: AtomicU32,
    rseq_cs: u64,
    rest: [u64; 2],
}

thread_local! {
    static FAKE: Fake = const {
        Fake { cpu_id_start: 0, cpu_id: AtomicU32::new(0), rseq_cs: 0, rest: [0; 2] }
    };
}

fn thread_pointer() -> usize {
    let at: usize;
    // SAFETY: the first word of a thread's control block points to itself (x86_64 ABI).
    unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) at, options(nostack, readonly)) };
    at
}

/// The same code without a section.
fn unprotected(real: Armed) -> Armed {
    FAKE.with(|fake| {
        fake.cpu_id.store(getcpu() as u32, Ordering::Relaxed);
        let at = ptr::from_ref(fake).addr();
        Armed { area: at.wrapping_sub(thread_pointer()) as isize, ..real }
    })
}

impl Armed {
    /// Adds `delta` to this CPU's word, with a long way from the load to the store; returns how
    /// often it was started.
    #[inline(never)]
    fn long_add(self, gate: &AtomicU64, words: &Words, delta: u64) -> Result<u64, Refused> {
        let mut starts = 0_u64;
        // SAFETY: as in `add`.
        let cpu = unsafe {
            section!(self, gate => "0", words, [
                    "inc {starts}",
                    "mov {sum}, qword ptr [{word}]",
                    "mov {spin:e}, {rounds:e}",
                    "24:",
                    "dec {spin:e}",
                    "jnz 24b",
                    "add {sum}, {delta}",
                    "mov qword ptr [{word}], {sum}",
                ],
                delta = in(reg) delta,
                rounds = in(reg) SPIN,
                spin = out(reg) _,
                sum = out(reg) _,
                starts = inout(reg) starts,)
        };
        super::outcome(cpu, self).map(|_| starts)
    }
}

/// Nominal; see [`Alarms`].
const SIGNAL_INTERVAL: Duration = Duration::from_micros(50);

/// What a worker must get at least, per second of the test: a hundredth of the nominal, since eight
/// of them share the CPUs of whatever machine this is.
const SIGNALS_PER_SECOND: u64 = 200;

thread_local! {
    // Nothing to drop, and a `const` value: a signal handler may use it at any moment.
    static SIGNALS: AtomicU64 = const { AtomicU64::new(0) };
}

extern "C" fn count(_: libc::c_int) {
    // Ordering: Relaxed, both; only this thread has it.
    SIGNALS.with(|n| n.store(n.load(Ordering::Relaxed) + 1, Ordering::Relaxed));
}

/// Calls `work` while signals come; returns what it does, and how many there were.
fn signalled<R>(work: impl FnOnce() -> R) -> (R, u64) {
    handle(count);
    let _timer = ThreadTimer::start(SIGNAL_INTERVAL);
    let result = work();
    (result, SIGNALS.with(|n| n.load(Ordering::Relaxed)))
}

/// Runs `work` on eight threads while signals to each, migrations and barriers go on; sums what it
/// returns. Longer, with other threads, where too few signals came in that time.
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

/// Adds to `signals` what each thread got.
fn disturb(
    until: Instant,
    work: impl Fn(&AtomicBool) -> u64 + Sync,
    signals: &mut [u64; THREADS],
) -> u64 {
    let stop = AtomicBool::new(false);
    let (tell, tids) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let (work, stop) = (&work, &stop);
        let workers: Vec<_> = (0..THREADS)
            .map(|_| {
                let tell = tell.clone();
                scope.spawn(move || {
                    // SAFETY: takes no arguments and touches no memory of ours.
                    tell.send(unsafe { libc::gettid() }).unwrap();
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

/// Whether this process was started, or built, without sections on purpose.
fn switched_off() -> bool {
    let tunables = env::var("GLIBC_TUNABLES").unwrap_or_default();
    cfg!(offlock_no_membarrier) || tunables.split(':').any(|t| t == "glibc.pthread.rseq=0")
}

/// Where sections do not run there is nothing to disturb, and CI must not think there was.
fn sections() -> Option<Armed> {
    if section::state() != Sections::InUse {
        println!("sections {}: nothing to test", section::state());
        let wanted = env::var_os("OFFLOCK_REQUIRE_ALL").is_some() && !switched_off();
        assert!(!wanted, "sections are wanted");
        return None;
    }
    armed()
}

#[test]
#[ignore = "stress: seconds of signals, migrations and barriers"]
fn stress_inv12_a_disturbed_section_adds_what_its_atomic_twin_adds() {
    let Some(real) = sections() else { return };
    let (open, words, twin) = (AtomicU64::new(0), Words::new().unwrap(), AtomicU64::new(0));
    let starts = disturbed(deadline(), |stop| {
        let (mut starts, mut n) = (0, 0_u64);
        while !stop.load(Ordering::Relaxed) {
            n += 1;
            starts += real.long_add(&open, &words, n).unwrap() - 1;
            twin.fetch_add(n, Ordering::Relaxed);
        }
        starts
    });
    assert_eq!(sum(&words), twin.into_inner(), "and {starts} aborts");
    println!("{starts} aborts, nothing lost");
    assert!(starts > 0, "nothing was interrupted: the test proves nothing");
}

/// The negative control of the test above.
#[test]
#[ignore = "stress: seconds of signals, migrations and barriers"]
fn stress_inv12_the_same_code_without_a_section_loses_updates() {
    let Some(real) = sections() else { return };
    let (open, words, twin) = (AtomicU64::new(0), Words::new().unwrap(), AtomicU64::new(0));
    let calls = disturbed(deadline(), |stop| {
        let mut calls = 0;
        while !stop.load(Ordering::Relaxed) {
            calls += 1;
            unprotected(real).long_add(&open, &words, 1).unwrap();
            twin.fetch_add(1, Ordering::Relaxed);
        }
        calls
    });
    let lost = twin.into_inner() - sum(&words);
    println!("{lost} of {calls} updates lost without a section");
    assert!(lost > 0, "the disturbance is too weak to prove anything");
}

/// All sections at once: a bounded count that spills into an atomic, and unbounded counts. Each is
/// compared with the number of rounds.
#[test]
#[ignore = "stress: seconds of signals, migrations and barriers"]
fn stress_inv12_every_section_agrees_with_atomics() {
    let Some(real) = sections() else { return };
    let (open, named) = (AtomicU64::new(0), AtomicU64::new(7 << 40));
    let [adds, bounded] = [(); 2].map(|()| Words::new().unwrap());
    let spilled = AtomicU64::new(0);
    let rounds = disturbed(deadline(), |stop| {
        let mut rounds = 0;
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..50 {
                rounds += 1;
                real.add(&open, &adds, 3).unwrap();
                real.add_while(&named, 7 << 40, &adds, 5).unwrap();
                assert_eq!(real.add_while(&named, 7, &adds, 1), Err(Refused::Closed));
                match real.add_within(&open, &bounded, 1, 16) {
                    Ok(_) => {}
                    Err(Refused::Busy) => {
                        let (_, old) = real.swap(&open, &bounded, 0).unwrap();
                        spilled.fetch_add(old + 1, Ordering::Relaxed);
                    }
                    Err(other) => panic!("{other:?}"),
                }
            }
        }
        rounds
    });
    assert_eq!(sum(&adds), 8 * rounds);
    assert_eq!(sum(&bounded) + spilled.into_inner(), rounds);
    println!("{rounds} rounds");
}

/// Closes the gate again and again while long sections run: after the barrier no word moves.
/// Returns how often one did.
fn moved_after_revoke(real: Armed, protect: bool) -> u64 {
    let (gate, words, adds) = (AtomicU64::new(0), Words::new().unwrap(), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    let until = deadline();
    let mut moved = 0;
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let ops = if protect { real } else { unprotected(real) };
                    match ops.long_add(&gate, &words, 1) {
                        Ok(_) => _ = adds.fetch_add(1, Ordering::Relaxed),
                        Err(_) => thread::yield_now(),
                    }
                }
            });
        }
        while keep_running(until, || protect || moved > 0) {
            gate.store(1, Ordering::Relaxed);
            fence::heavy_rseq();
            let before = sum(&words);
            for _ in 0..2_000 {
                hint::spin_loop();
            }
            thread::yield_now(); // those that were preempted inside a section come back now
            moved += u64::from(sum(&words) != before);
            gate.store(0, Ordering::Relaxed);
            thread::sleep(Duration::from_micros(50));
        }
        stop.store(true, Ordering::Relaxed);
    });
    if protect {
        assert_eq!(sum(&words), adds.into_inner());
    }
    moved
}

#[test]
#[ignore = "stress: seconds of revoking"]
fn stress_inv13_no_section_commits_after_it_was_revoked() {
    let Some(real) = sections() else { return };
    assert_eq!(moved_after_revoke(real, true), 0);
    let control = moved_after_revoke(real, false);
    println!("without a section, {control} late commits");
    assert!(control > 0, "the control saw no late commit: the test proves nothing");
}

#[test]
fn usable_agrees_with_what_is_armed() {
    let Ok(found) = usable() else { return assert_ne!(section::state(), Sections::InUse) };
    assert_eq!(section::state(), Sections::InUse);
    let real = armed().expect("in use");
    assert_eq!((found.area, found.limit), (real.area, real.limit));
}
