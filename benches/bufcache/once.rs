//! B7: threads that miss one page at once.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use bufcache::Cache;
use bufcache_test::{Fault, FaultDevice, Operation};
use harness::{Plan, Report};

use crate::ours::{Numbers, OPEN};
use crate::pages::{PAGE, word};

const THREADS: usize = 8;
const PAGES: u64 = 200;

/// The time of a read: each thread has the time to miss.
const READ: Duration = Duration::from_micros(200);

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    let cache = Cache::new(2 * PAGES as usize * PAGE).expect(OPEN);
    let numbers = Arc::new(FaultDevice::new(Numbers));
    numbers.inject(Operation::Read, .., Fault::Delay(READ));
    let device = cache.attach(Arc::clone(&numbers)).expect(OPEN);
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for number in 0..PAGES {
                    barrier.wait();
                    assert_eq!(word(&device.get(number).expect(OPEN), 0), number);
                }
            });
        }
    });
    let stats = cache.stats();
    let reads = numbers.count(Operation::Read) as f64 / PAGES as f64;
    println!("- {THREADS} threads, {PAGES} pages: {reads} reads a page; {stats}");
    report.record("B7.reads_per_8_missers.n", Some(reads));
}
