//! B6: hits beside another thread's read that takes long.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use bufcache::{Cache, Device};
use harness::timed::on_one_cpu;
use harness::{Plan, Report, allowed_cpus, median, pin};

use crate::ours::{OPEN, Slow, times};

const BLOCK: usize = 512;
const HOT: u64 = 1024;
const ROOM: usize = 4096;
/// The time that a read takes.
const SLOW: Duration = Duration::from_micros(100);
/// Hits of a window.
const HITS: u64 = 200_000;

/// The p99.9 of a hit.
fn hits(device: &Device) -> f64 {
    times(device, (0..HITS).map(|count| count * 37 % HOT), 99.9)
}

/// Makes a cache whose frames are touched already, with the hot blocks in it.
fn cache() -> (Cache, Device) {
    let builder = Cache::builder(ROOM * BLOCK).block_size(BLOCK);
    let cache = builder.dirty_limits(50, 75).build().expect(OPEN);
    let device = cache.attach(Slow(Duration::ZERO)).expect(OPEN);
    for number in (1 << 20..(1 << 20) + ROOM as u64).chain(0..HOT).chain(0..HOT) {
        drop(device.get(number).expect(OPEN));
    }
    (cache, device)
}

/// Measures the p99.9 of a hit, alone and beside another thread's reads of a slow device, and records
/// their ratio.
pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let cpus = allowed_cpus();
    if cpus.len() < 2 {
        return println!("# not measured: hits beside a slow device: one CPU");
    }
    let (cache, device) = cache();
    let slow = cache.attach(Slow(SLOW)).expect(OPEN);
    let (busy, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let ratios: Vec<[f64; 3]> = thread::scope(|scope| {
        let (sender, turns) = channel::<()>();
        let (busy, over, slow) = (&busy, &over, &slow);
        scope.spawn(move || {
            pin(cpus[1]);
            let mut fresh = 0;
            // A turn: one after the other, until it is over.
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
            let rounds = (0..plan.rounds.min(15)).map(round).collect();
            drop(sender);
            rounds
        })
    });
    let of = |at: usize| median(&ratios.iter().map(|round| round[at]).collect::<Vec<_>>());
    let [alone, beside] = [0, 1].map(|at| of(at).unwrap_or(f64::NAN));
    println!("- a hit, p99.9: {alone:.0} ns alone, {beside:.0} beside reads of 100 us");
    report.record("B6.hit_p999_beside_slow_read", of(2));
}
