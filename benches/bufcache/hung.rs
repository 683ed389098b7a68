//! B13: gets on a healthy device beside one that answers nothing, which has readers, writers and dirty blocks.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bufcache::{Cache, Device};
use bufcache_test::{FaultDevice, Operation};
use harness::timed::measure;
use harness::{Plan, Ratio, Report};

use crate::ours::{Numbers, OPEN, few, percentile_of, times};
use crate::pages::PAGE;

const ALONE: &str = "alone";
const BESIDE: &str = "beside a device that hangs";
const ROOM: usize = 4096;
/// Gets of a window, of twice as many blocks as there is room for.
const GETS: u64 = 20_000;

fn cache(read: Duration) -> (Cache, Device) {
    let cache = Cache::new(ROOM * PAGE).expect(OPEN);
    let device = cache.attach(Numbers(read)).expect(OPEN);
    (cache, device)
}

/// The p99 of a get.
fn gets(device: &Device) -> f64 {
    times(device, (0..GETS).map(|count| count * 37 % (2 * ROOM as u64)), 99.0)
}

/// The target is about a device as fast as they come. With one that takes no time the figure is that of the evictor,
/// which passes by the dirty blocks of the other device.
pub(crate) fn run(plan: &Plan, report: &mut Report) {
    beside_hung(plan, report, Duration::ZERO);
    let ratio = beside_hung(plan, report, Duration::from_micros(10));
    report.record("B13.get_beside_hung_device", ratio);
}

/// Returns the p99 of gets beside a hung device over the p99 without it. Each read takes `read`.
fn beside_hung(plan: &Plan, report: &Report, read: Duration) -> Option<Ratio> {
    let (_alone_cache, alone) = cache(read);
    let (beside_cache, beside) = cache(read);
    let hung = Arc::new(FaultDevice::new(Numbers(Duration::ZERO)));
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
            vec![percentile_of(ALONE, || gets(&alone)), percentile_of(BESIDE, || gets(&beside))];
        let group = format!("p99 of gets, reads of {read:?}");
        let [rounds] = measure([&group], &few(plan), rows);
        drop(held);
        rounds
    });
    report.show(&rounds);
    println!("- bufcache: {}", beside_cache.stats());
    rounds.time_ratio(BESIDE, ALONE)
}
