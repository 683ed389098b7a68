//! B6: hits beside another thread's read that takes long, and how long misses hold locks.
//!
//! The locks are timed from outside: a whole miss of a small block, from a device that does nothing,
//! takes longer than any lock within it is held.

use std::hint::{black_box, spin_loop};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use bufcache::{BlockDevice, Cache, Device};
use harness::timed::on_one_cpu;
use harness::{Plan, Report, allowed_cpus, median, percentile, pin};

use crate::ours::OPEN;

const BLOCK: usize = 512;
const HOT: u64 = 1024;
const ROOM: usize = 4096;
/// How long a read takes.
const READ: Duration = Duration::from_micros(100);
/// Hits of a window.
const HITS: u64 = 200_000;

/// Reads do nothing, for a while.
struct Slow(Duration);

impl BlockDevice for Slow {
    fn len(&self) -> u64 {
        1 << 45
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        let start = Instant::now();
        while self.0 > Duration::ZERO && start.elapsed() < self.0 {
            spin_loop();
        }
        Ok(buf.len())
    }
}

fn percentile_999(times: &[f64]) -> f64 {
    percentile(times, 99.9).unwrap_or(f64::NAN)
}

/// The p99.9 of a hit.
fn hits(device: &Device) -> f64 {
    let mut times = Vec::with_capacity(HITS as usize);
    for count in 0..HITS {
        let start = Instant::now();
        black_box(device.get(count * 37 % HOT).expect(OPEN)[0]);
        times.push(start.elapsed().as_nanos() as f64);
    }
    percentile_999(&times)
}

fn miss(device: &Device) -> f64 {
    let mut times = Vec::with_capacity(HITS as usize / 4);
    for count in 0..HITS / 4 {
        let start = Instant::now();
        black_box(device.get(HOT + count).expect(OPEN)[0]);
        times.push(start.elapsed().as_nanos() as f64);
    }
    percentile_999(&times)
}

/// With frames of its own that are touched already, and the hot blocks in it.
fn cache() -> (Cache, Device) {
    let cache = Cache::builder(ROOM * BLOCK).block_sizes(BLOCK, BLOCK).build().expect(OPEN);
    let device = cache.attach(Slow(Duration::ZERO), BLOCK).expect(OPEN);
    for number in (1 << 20..(1 << 20) + ROOM as u64).chain(0..HOT).chain(0..HOT) {
        drop(device.get(number).expect(OPEN));
    }
    (cache, device)
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let rounds = plan.rounds.min(15);
    let misses: Vec<f64> = on_one_cpu(|| {
        (0..rounds)
            .map(|_| {
                let (_cache, device) = cache();
                miss(&device)
            })
            .collect()
    });
    let held = median(&misses);
    println!("  a whole miss, p99.9 of each run, median: {:.0} ns", held.unwrap_or(f64::NAN));
    report.record("B6.lock_hold_p999.ns", held);

    let cpus = allowed_cpus().expect("this process has CPUs");
    if cpus.len() < 2 {
        println!("# not measured: hits beside a slow read: one CPU");
        return;
    }
    let (cache, device) = cache();
    let slow = cache.attach(Slow(READ), BLOCK).expect(OPEN);
    let (busy, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let ratios: Vec<[f64; 3]> = thread::scope(|scope| {
        let (sender, turns) = channel::<()>();
        let (busy, over, slow) = (&busy, &over, &slow);
        scope.spawn(move || {
            pin(cpus[1]).expect("an allowed CPU");
            let mut fresh = 0;
            // A turn: misses, one after the other, until it is over.
            while turns.recv().is_ok() {
                // Ordering: Relaxed, all of them; flags that carry nothing.
                while busy.load(Ordering::Relaxed) {
                    fresh += 1;
                    drop(slow.get(fresh).expect(OPEN));
                }
                over.store(true, Ordering::Relaxed);
            }
        });
        on_one_cpu(|| {
            let round = |_| {
                let alone = hits(&device);
                busy.store(true, Ordering::Relaxed);
                sender.send(()).expect("it waits for turns");
                let beside = hits(&device);
                busy.store(false, Ordering::Relaxed);
                while !over.swap(false, Ordering::Relaxed) {
                    thread::yield_now();
                }
                [alone, beside, beside / alone]
            };
            let rounds = (0..rounds).map(round).collect();
            drop(sender);
            rounds
        })
    });
    let of = |at: usize| median(&ratios.iter().map(|round| round[at]).collect::<Vec<_>>());
    let [alone, beside] = [0, 1].map(|at| of(at).unwrap_or(f64::NAN));
    println!("  a hit, p99.9: {alone:.0} ns alone, {beside:.0} beside reads of 100 us");
    report.record("B6.hit_p999_beside_slow_read", of(2));
}
