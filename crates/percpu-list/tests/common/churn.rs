//! What the stress tests share: values that know whether they live, threads that move from CPU to CPU.

use std::env;
use std::io;
use std::mem;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use percpu_list::CpuId;

use crate::goes_on::goes_on;
use crate::seconds::stress_time;

/// How many values of one test live.
#[derive(Default)]
pub(crate) struct Census(Arc<AtomicI64>);

impl Census {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn alive(&self) -> i64 {
        self.0.load(Relaxed)
    }
}

/// Knows whether it lives, and is large enough to be seen half written.
pub(crate) struct Canary {
    words: [u64; 4],
    alive: Arc<AtomicI64>,
}

impl Canary {
    pub(crate) fn new(value: u64, census: &Census) -> Self {
        census.0.fetch_add(1, Relaxed);
        Self { words: [value; 4], alive: Arc::clone(&census.0) }
    }

    pub(crate) fn read(&self) -> u64 {
        let value = self.words[0];
        assert!(value != u64::MAX, "read after its drop");
        assert!(self.words.iter().all(|word| *word == value), "torn: {:?}", self.words);
        value
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.read();
        for word in &mut self.words {
            // SAFETY: ours; volatile, as nobody is to read it.
            unsafe { std::ptr::from_mut(word).write_volatile(u64::MAX) };
        }
        self.alive.fetch_sub(1, Relaxed);
    }
}

/// A generator of numbers that need not be good.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % sides
    }

    /// Any CPU of this machine.
    pub(crate) fn cpu(&mut self) -> CpuId {
        CpuId::new(self.roll(possible()) as u32)
    }
}

pub(crate) fn possible() -> usize {
    percpu::sync::cpu::possible()
}

/// The CPUs that this process may run on.
pub(crate) fn allowed_cpus() -> Vec<usize> {
    let list = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = list.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let list: percpu::CpuList = list.parse().unwrap();
    list.iter().map(CpuId::index).collect()
}

/// Lets the calling thread run on `cpus` only; it does when this returns.
pub(crate) fn pin_to(cpus: &[usize]) {
    // SAFETY: plain bytes, of which zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for &cpu in cpus {
        assert!(cpu < libc::CPU_SETSIZE as usize);
        // SAFETY: `cpu` was just checked against the size of the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is initialised, and its size is the one given.
    let rc = unsafe { libc::sched_setaffinity(0, mem::size_of_val(&set), &set) };
    assert_eq!(rc, 0, "sched_setaffinity: {}", io::Error::last_os_error());
}

/// Runs `f` on threads until the time is over, or one of them panics; it is told its thread's number,
/// and given a dice. Between its calls threads move from CPU to CPU. Returns how often it was called.
pub(crate) fn storm(
    threads: usize,
    enough: impl Fn(u64) -> bool + Sync,
    f: impl Fn(usize, &mut Dice) + Sync,
) -> u64 {
    storm_on(&allowed_cpus(), threads, enough, f)
}

/// [`storm`] on these CPUs.
pub(crate) fn storm_on(
    cpus: &[usize],
    threads: usize,
    enough: impl Fn(u64) -> bool + Sync,
    f: impl Fn(usize, &mut Dice) + Sync,
) -> u64 {
    /// Also after a panic, so that the others end.
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
                let mut dice = Dice::new(me as u64);
                let on = || goes_on(until, || enough(calls.load(Relaxed)));
                while !stop.0.load(Relaxed) && on() {
                    pin_to(&[cpus[dice.roll(cpus.len())]]);
                    for _ in 0..32 {
                        f(me, &mut dice);
                    }
                    calls.fetch_add(32, Relaxed);
                }
            });
        }
    });
    let calls = calls.into_inner();
    println!("{calls} calls; {}", percpu::capabilities());
    calls
}

/// All stress tests of this program that check an invariant, in a process without rseq.
pub(crate) fn all_of_it_without_rseq() {
    let status = Command::new(env::current_exe().unwrap())
        .args(["--ignored", "--test-threads=1", "stress_inv"])
        .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
        .env("OFFLOCK_STRESS_SECONDS", "1")
        .status()
        .unwrap();
    assert!(status.success());
}
