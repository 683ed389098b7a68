//! B7: threads that miss one page at once.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use bufcache::{BlockDevice, Cache};
use harness::{Plan, Report};

use crate::ours::OPEN;
use crate::pages::{PAGE, fill, word};

const THREADS: usize = 8;
const PAGES: u64 = 200;

/// Counts reads, which take a while: each thread has the time to miss.
struct Slow(AtomicU64);

impl BlockDevice for Slow {
    fn len(&self) -> u64 {
        PAGES * PAGE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        // Ordering: Relaxed; the threads are joined before the count is read.
        self.0.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_micros(200));
        fill(offset / PAGE as u64, buf);
        Ok(buf.len())
    }
}

pub(crate) fn run(_plan: &Plan, report: &mut Report) {
    let cache = Cache::new(2 * PAGES as usize * PAGE).expect(OPEN);
    let device = Arc::new(Slow(AtomicU64::new(0)));
    let attached = cache.attach(Arc::clone(&device)).expect(OPEN);
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for number in 0..PAGES {
                    barrier.wait();
                    assert_eq!(word(&attached.get(number).expect(OPEN), 0), number);
                }
            });
        }
    });
    // Ordering: Relaxed; the threads were joined.
    let reads = device.0.load(Ordering::Relaxed) as f64 / PAGES as f64;
    let stats = cache.stats();
    println!("- {THREADS} threads, {PAGES} pages: {reads} reads a page; {stats}");
    report.record("B7.reads_per_8_missers.n", Some(reads));
}
