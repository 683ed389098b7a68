//! B6: hits beside another thread's read that takes long.

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
/// The time that a read takes.
const SLOW: Duration = Duration::from_micros(100);
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

/// The p99.9 of a hit.
fn hits(device: &Device) -> f64 {
    let mut times = Vec::with_capacity(HITS as usize);
    for count in 0..HITS {
        let start = Instant::now();
        black_box(device.get(count * 37 % HOT).expect(OPEN)[0]);
        times.push(start.elapsed().as_nanos() as f64);
    }
    percentile(&times, 99.9).unwrap_or(f64::NAN)
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

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let rounds = plan.rounds.min(15);
    let read = |device: &Device, number: u64| drop(device.get(number).expect(OPEN));
    if let Some([alone, beside, ratio]) = beside(rounds, read) {
        println!("- a hit, p99.9: {alone:.0} ns alone, {beside:.0} beside reads of 100 us");
        report.record("B6.hit_p999_beside_slow_read", Some(ratio));
    }
}

/// The p99.9 of a hit alone, beside what another thread does to a slow device, and their ratio.
fn beside(rounds: usize, what: impl Fn(&Device, u64) + Sync) -> Option<[f64; 3]> {
    let cpus = allowed_cpus().expect("this process has CPUs");
    if cpus.len() < 2 {
        println!("# not measured: hits beside a slow device: one CPU");
        return None;
    }
    let (cache, device) = cache();
    let slow = cache.attach(Slow(SLOW)).expect(OPEN);
    let (busy, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let ratios: Vec<[f64; 3]> = thread::scope(|scope| {
        let (sender, turns) = channel::<()>();
        let (busy, over, slow, what) = (&busy, &over, &slow, &what);
        scope.spawn(move || {
            pin(cpus[1]).expect("an allowed CPU");
            let mut fresh = 0;
            // A turn: one after the other, until it is over.
            while turns.recv().is_ok() {
                // Ordering: Relaxed, all of them; flags that carry nothing.
                while busy.load(Ordering::Relaxed) {
                    fresh += 1;
                    what(slow, fresh);
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
    Some([of(0)?, of(1)?, of(2)?])
}
