//! How long gets take: alone, as threads of other tests have the words for hits that are sampled.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use bufcache::{Cache, MemoryDevice};

#[test]
fn hits_are_sampled_and_misses_timed() {
    let cache = Cache::new(64 * 4096).unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![3; 4096 * 100]), 4096).unwrap();
    for round in 0..10_000_u64 {
        drop(disk.get(round % 10).unwrap());
    }
    let times = cache.times();
    assert_eq!((times.hits.count(), times.misses.count()), (9_990 / 4096, 10));
    assert!(times.hits.percentile(50.0) <= times.misses.percentile(50.0), "{times}");
    assert_eq!(cache.stats().hits, 9_990, "what is timed is counted once");
}
