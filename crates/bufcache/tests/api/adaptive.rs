//! What an adaptive cache learns.

use bufcache::{Cache, Eviction, MemoryDevice};

const SIZE: usize = 512;
const BUFFERS: u64 = 2000;

/// A cache that has become larger has room for a while. Another rule is found to be better meanwhile.
#[test]
fn a_rule_that_changes_while_there_is_room_is_followed() {
    let builder = Cache::builder(BUFFERS as usize * SIZE).block_sizes(SIZE, SIZE);
    let cache = builder.eviction(Eviction::Adaptive).build().unwrap();
    let disk = MemoryDevice::new(vec![0; 8 * BUFFERS as usize * SIZE]);
    let disk = cache.attach(disk, SIZE).unwrap();
    cache.resize(BUFFERS as usize / 2 * SIZE).unwrap();
    (0..2 * BUFFERS).for_each(|block| drop(disk.get(block).unwrap()));
    assert_eq!(cache.stats().eviction, Eviction::A2);
    cache.shrink(usize::MAX);
    cache.resize(BUFFERS as usize * SIZE).unwrap();
    // There and back, which suits the clock. Each is a miss, so the shadows hear of it, and the cache is empty.
    let there_and_back = || (0..2 * BUFFERS).chain((0..2 * BUFFERS).rev());
    for block in (0..40).flat_map(|_| there_and_back()) {
        drop(disk.get(block).unwrap());
        disk.invalidate(block).unwrap();
    }
    assert_eq!(cache.stats().eviction, Eviction::Clock);
}
