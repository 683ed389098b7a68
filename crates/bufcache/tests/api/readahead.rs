//! Readahead, and what is read once.

use crate::devices::numbered;
use crate::world::*;

const SIZE: usize = 4096;

fn new(buffers: usize) -> (Cache, Device, Disk) {
    let device = Arc::new(FaultDevice::new(MemoryDevice::new(numbered())));
    let cache = Cache::new(buffers * SIZE).unwrap();
    let disk = cache.attach(Arc::clone(&device)).unwrap();
    (cache, disk, device)
}

#[test]
fn inv13_readahead_neither_waits_nor_fails() {
    let (cache, disk, device) = new(64);
    wait_for("it is asked", || {
        disk.readahead(3..7);
        cache.stats().reads > 0
    });
    wait_for("four blocks are read", || cache.stats().reads == 4);
    wait_for("and there", || (3..7).all(|block| disk.try_get(block).is_ok()));
    assert_eq!((disk.get(3).unwrap()[0], device.count(Operation::Read)), (24, 4));

    // Nor do ranges that there are none of.
    disk.readahead(0..0);
    disk.readahead(u64::MAX - 1..u64::MAX);

    // A block that fails is read again by the get that needs it, and the next ranges are read.
    device.inject_next(Operation::Read, Fault::Panic);
    disk.readahead(41..42);
    wait_for("it has begun", || device.count(Operation::Read) == 5); // two threads read in any order
    wait_for("the next range is read", || {
        disk.readahead(42..43);
        disk.try_get(42).is_ok()
    });
    wait_for("its block is given up", || !disk.is_cached(41));
    assert_eq!(disk.get(41).unwrap()[0], 72);
}

#[test]
fn a_cache_ends_while_it_reads_ahead() {
    let (cache, disk, device) = new(64);
    device.inject(Operation::Read, .., Fault::Delay(Duration::from_millis(20)));
    disk.readahead(0..8);
    drop((disk, cache));
    wait_for("the thread lets go of the device", || Arc::strong_count(&device) == 1);
    assert_eq!(device.count(Operation::Read), 8);
}

#[test]
fn inv13_readahead_waits_for_no_device_and_drops_what_is_too_much() {
    let (cache, disk, device) = new(16);
    let held = device.hold(Operation::Read);
    // Were it to wait, this would never end.
    for block in (0..40).cycle().take(200) {
        disk.readahead(block..block + 1);
    }
    // The first 16 have all buffers, and are as good as there.
    assert_eq!(cache.stats().ahead_dropped, 5 * (40 - 16));
    drop(held);
    wait_for("the first are read", || (0..16).all(|block| disk.try_get(block).is_ok()));
    assert_eq!(disk.get(48).unwrap()[0], (48 * 8 % 256) as u8);
}

#[test]
fn a_small_cache_reads_less_ahead() {
    let (_cache, disk, device) = new(16);
    disk.readahead(0..disk.blocks());
    wait_for("two blocks are read", || device.count(Operation::Read) == 2);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(device.count(Operation::Read), 2, "an eighth of it");
}
