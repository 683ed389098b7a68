//! B6: hits beside another thread's read that takes long. B13: gets on a healthy device beside one that answers
//! nothing, which has readers, writers and dirty blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use bufcache::{Cache, Device};
use bufcache_test::{FaultDevice, Operation};
use harness::timed::measure;
use harness::{Plan, Ratio, Report, allowed_cpus, pin};

use crate::ours::{OPEN, Slow, few, percentile_of, times};
use crate::pages::PAGE;

const ALONE: &str = "alone";
const SLOW_READS: &str = "beside reads of 100 us";
const HUNG: &str = "beside a device that hangs";
const ROOM: usize = 4096;
const BLOCK: usize = 512;
const HOT: u64 = 1024;
/// The time that a read takes.
const SLOW: Duration = Duration::from_micros(100);
/// Hits of a window.
const HITS: u64 = 200_000;

/// The p99.9 of a hit.
fn hits(device: &Device) -> f64 {
    times(device, (0..HITS).map(|count| count * 37 % HOT), 99.9)
}

/// Makes a cache whose frames are touched already, with the hot blocks in it.
fn hot_cache() -> (Cache, Device) {
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
pub(crate) fn run_slow(plan: &Plan, report: &mut Report) {
    let cpus = allowed_cpus();
    if cpus.len() < 2 {
        return println!("# not measured: hits beside a slow device: one CPU");
    }
    let (cache, device) = hot_cache();
    let slow = cache.attach(Slow(SLOW)).expect(OPEN);
    let fresh = AtomicU64::new(0);
    let beside = || {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                pin(cpus[1]);
                // Ordering: Relaxed, all of them; a flag and a number that carry nothing.
                while !is_over.load(Ordering::Relaxed) {
                    drop(slow.get(fresh.fetch_add(1, Ordering::Relaxed)).expect(OPEN));
                }
            });
            let beside = hits(&device);
            is_over.store(true, Ordering::Relaxed);
            beside
        })
    };
    let rows = vec![percentile_of(ALONE, || hits(&device)), percentile_of(SLOW_READS, beside)];
    let [rounds] = measure(["p99.9 of hits"], &few(plan), rows);
    report.show(&rounds);
    report.record("B6.hit_p999_beside_slow_read", rounds.time_ratio(SLOW_READS, ALONE));
}

/// Gets of a window, of twice as many blocks as there is room for.
const GETS: u64 = 20_000;

fn cache(read: Duration) -> (Cache, Device) {
    let cache = Cache::new(ROOM * PAGE).expect(OPEN);
    let device = cache.attach(Slow(read)).expect(OPEN);
    (cache, device)
}

/// The p99 of a get.
fn gets(device: &Device) -> f64 {
    times(device, (0..GETS).map(|count| count * 37 % (2 * ROOM as u64)), 99.0)
}

/// The target is about a device as fast as they come. With one that takes no time the figure is that of the evictor,
/// which passes by the dirty blocks of the other device.
pub(crate) fn run_hung(plan: &Plan, report: &mut Report) {
    beside_hung(plan, report, Duration::ZERO);
    let ratio = beside_hung(plan, report, Duration::from_micros(10));
    report.record("B13.get_beside_hung_device", ratio);
}

/// Returns the p99 of gets beside a hung device over the p99 without it. Each read takes `read`.
fn beside_hung(plan: &Plan, report: &Report, read: Duration) -> Option<Ratio> {
    let (_alone_cache, alone) = cache(read);
    let (beside_cache, beside) = cache(read);
    let hung = Arc::new(FaultDevice::new(Slow(Duration::ZERO)));
    let held = [Operation::Read, Operation::Write, Operation::Sync].map(|kind| hung.hold(kind));
    let disk = beside_cache.attach(Arc::clone(&hung)).expect(OPEN);
    let rounds = thread::scope(|scope| {
        for reader in 0..2 {
            let disk = &disk;
            scope.spawn(move || drop(disk.get(1 << 20 | reader)));
        }
        // Until it has its share of the dirty blocks, and is refused more or waits for one that is written.
        scope.spawn(|| (0..ROOM as u64).try_for_each(|block| disk.create(block).map(drop)));
        gets(&beside); // whose device wants buffers from here on
        thread::sleep(2 * plan.window);
        let rows =
            vec![percentile_of(ALONE, || gets(&alone)), percentile_of(HUNG, || gets(&beside))];
        let group = format!("p99 of gets, reads of {read:?}");
        let [rounds] = measure([&group], &few(plan), rows);
        drop(held);
        rounds
    });
    report.show(&rounds);
    println!("- bufcache: {}", beside_cache.stats());
    rounds.time_ratio(HUNG, ALONE)
}
