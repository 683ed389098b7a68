//! B6: hits beside another thread's read that takes long.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use bufcache::{Cache, Device};
use harness::timed::measure;
use harness::{Plan, Report, allowed_cpus, pin};

use crate::ours::{Numbers, OPEN, few, percentile_of, times};

const ALONE: &str = "alone";
const BESIDE: &str = "beside reads of 100 us";
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
    let device = cache.attach(Numbers(Duration::ZERO)).expect(OPEN);
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
    let slow = cache.attach(Numbers(SLOW)).expect(OPEN);
    let (busy, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let rounds = thread::scope(|scope| {
        let (sender, turns) = channel::<()>();
        let (busy, over, slow, device) = (&busy, &over, &slow, &device);
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
        let beside = move || {
            busy.store(true, Ordering::Relaxed);
            sender.send(()).expect("it waits for turns");
            let beside = hits(device);
            busy.store(false, Ordering::Relaxed);
            while !over.swap(false, Ordering::Relaxed) {
                thread::yield_now();
            }
            beside
        };
        let rows = vec![percentile_of(ALONE, || hits(device)), percentile_of(BESIDE, beside)];
        let [rounds] = measure(["p99.9 of hits"], &few(plan), rows); // drops the sender
        rounds
    });
    report.show(&rounds);
    report.record("B6.hit_p999_beside_slow_read", rounds.time_ratio(BESIDE, ALONE));
}
