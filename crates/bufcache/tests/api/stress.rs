//! Storms on this kernel: threads that come and go write, read, discard and sync blocks of devices that fail.
//!
//! Ignored by default: `OFFLOCK_STRESS_SECONDS` (3) says how long each test runs.

use std::sync::atomic::Ordering;

use testkit::stress::{keep_running, stress_time};

use crate::machine::{Shape, THREADS, World};
use crate::world::*;

/// Threads come and go, so that others have later what they had.
fn storm(buffers: usize, devices: usize, eviction: Eviction, fails: bool) {
    let shape = Shape { devices, blocks: 64, buffers, eviction, records: false, fails, ..THREADS };
    let (world, until) = (Arc::new(World::new(shape)), Instant::now() + stress_time(3));
    let is_enough = || world.done().iter().all(|&count| count > 500);
    let runs = || keep_running(until, is_enough);
    (1..).take_while(|_| runs()).for_each(|seed| world.rage(4, seed, 5_000, || !runs()));
    println!("writes, reads and evictions: {:?}", world.done());
    assert!(is_enough(), "a storm in a teacup");
    world.calm();
}

#[test]
#[ignore = "stress"]
fn stress_inv06_guards_and_pins_in_a_cache_of_four_buffers() {
    storm(4, 1, Eviction::Clock, true);
}

#[test]
#[ignore = "stress"]
fn stress_inv10_two_devices_and_a_cache_of_sixteen_buffers() {
    storm(16, 2, Eviction::Adaptive, true);
}

#[test]
#[ignore = "stress"]
fn stress_inv17_writers_of_two_devices_lose_nothing() {
    storm(8, 2, Eviction::A2, true);
}

/// Without faults: each read past the cache comes after a flush that succeeds, or needs none.
#[test]
#[ignore = "stress"]
fn stress_inv17_reads_past_the_cache_find_what_was_written() {
    storm(16, 1, Eviction::Adaptive, false);
}

/// In each round, four threads get the same uncached block at once: it is read once. There are
/// buffers for all blocks, and for each thread that loses the race.
#[test]
#[ignore = "stress"]
fn stress_inv02_a_block_is_read_once_whoever_asks() {
    const BLOCKS: u64 = 24;
    let cache = Cache::builder(64 * 512).block_size(512).build().unwrap();
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; 512 * BLOCKS as usize])));
    let device = cache.attach(Arc::clone(&disk)).unwrap();
    let until = Instant::now() + stress_time(3);
    let (start, rounds) = (Barrier::new(4), AtomicU64::new(0));
    let was_again = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    if start.wait().is_leader() {
                        let round = rounds.load(Ordering::Relaxed);
                        device.invalidate(round % BLOCKS).unwrap();
                        let runs = keep_running(until, || round > 100);
                        rounds.store(if runs { round + 1 } else { 0 }, Ordering::Relaxed);
                    }
                    start.wait();
                    let round = rounds.load(Ordering::Relaxed);
                    if round == 0 {
                        break;
                    }
                    assert_eq!(device.get((round - 1) % BLOCKS).unwrap()[9], 1);
                    start.wait();
                    // Not asserted before the end: the others would wait for this thread.
                    let is_again = disk.count(Operation::Read) != round;
                    was_again.fetch_or(is_again, Ordering::Relaxed);
                }
            });
        }
    });
    println!("{}", cache.stats());
    assert!(!was_again.into_inner(), "a block was read again");
    assert!(disk.count(Operation::Read) > 100, "too few rounds");
}
