//! A device that drops unsynced writes and serves the older bytes again: what a reset says of the blocks
//! that were read from it meanwhile.

use std::io::IoSlice;

use crate::world::*;

fn new() -> (Cache, Device, Disk) {
    let new = crate::world::new();
    new.2.record().unwrap();
    new
}

/// The device has `value` in a block, not durably, and the cache does not have the block.
fn write_and_evict(cache: &Cache, device: &Device, block: u64, value: u8) {
    fill(device, block, value);
    device.flush().unwrap();
    wait_for("an evicted block", || {
        cache.shrink(16);
        !device.is_cached(block)
    });
}

/// What a reset returns after a sync that fails.
fn lost(device: &Device) -> Vec<u64> {
    assert_eq!(device.sync(), POISONED);
    let lost = device.reset().unwrap().blocks().iter().cloned().flatten().collect();
    device.sync().unwrap();
    lost
}

#[test]
fn inv24_a_load_that_runs_while_the_sync_fails_is_no_copy() {
    let (cache, device, disk) = new();
    write_and_evict(&cache, &device, 1, 2);
    disk.give_up_writes().unwrap();
    let held = disk.hold(Operation::Read);
    let reader = thread::spawn({
        let device = device.clone();
        move || device.get(1).map(|guard| guard[0])
    });
    held.wait();
    let lost = thread::scope(|scope| {
        let loses = scope.spawn(|| lost(&device));
        wait_for("the sync", || disk.count(Operation::Sync) > 0);
        drop(held); // the reset waits for the load
        loses.join().unwrap()
    });
    assert_eq!(lost, [1]);
    assert_eq!(reader.join().unwrap(), Ok(1));
}

#[test]
fn inv24_a_block_that_is_created_after_it_was_read_again_is_not_lost() {
    for (is_cached, tried) in [(false, false), (false, true), (true, false), (true, true)] {
        let (cache, device, disk) = new();
        write_and_evict(&cache, &device, 1, 2);
        disk.give_up_writes().unwrap();
        drop(device.get(1).unwrap());
        if !is_cached {
            wait_for("an evicted block", || {
                cache.shrink(16);
                !device.is_cached(1)
            });
        }
        if tried { device.try_create(1) } else { device.create(1) }.unwrap().fill(5);
        assert_eq!(lost(&device), []);
        assert_eq!(on_disk(&disk, 1), 5);
    }
}

/// Every way in which the device is read for the cache.
#[test]
fn inv24_readahead_tasks_and_claims_read_blocks_again_as_well() {
    let (cache, device, disk) = new();
    for block in 1..4 {
        write_and_evict(&cache, &device, block, 2);
    }
    fill(&device, 4, 2);
    device.flush().unwrap();
    disk.give_up_writes().unwrap();
    device.readahead(1..2);
    wait_for("a block that is read ahead", || device.try_get(1).is_ok());
    assert_eq!(block_on(device.get_async(2)).unwrap()[0], 1);
    let mut load = device.claim(3).unwrap().unwrap();
    let count = disk.inner().read(load.offset(), &mut load).unwrap();
    load.finish(Ok(count));
    assert_eq!(device.get(3).unwrap()[0], 1);
    assert_eq!(lost(&device), [1, 2, 3]);
}

/// Block 1 is written before the sync begins, and block 2 after that. Both are read again while it runs.
#[test]
fn inv24_a_sync_vouches_for_the_blocks_that_were_written_before_it_began() {
    let (cache, device, disk) = new();
    write_and_evict(&cache, &device, 1, 2);
    let held = disk.hold(Operation::Sync);
    thread::scope(|scope| {
        let syncing = scope.spawn(|| device.sync());
        held.wait();
        write_and_evict(&cache, &device, 2, 2);
        drop((device.get(1).unwrap(), device.get(2).unwrap()));
        drop(held);
        syncing.join().unwrap().unwrap();
    });
    fill(&device, 1, 3);
    device.flush().unwrap();
    disk.give_up_writes().unwrap();
    assert_eq!(lost(&device), [2]);
}

/// The fault device itself.
#[test]
fn a_sync_that_reverts_leaves_the_writes_that_came_after_it_began() {
    let (_cache, device, disk) = new();
    fill(&device, 1, 2);
    device.sync().unwrap();
    fill(&device, 1, 3);
    fill(&device, 2, 3);
    fill(&device, 3, 3);
    device.flush().unwrap();
    let durable = disk.write_vectored(3 * SIZE as u64, &[IoSlice::new(&[4; SIZE])], true);
    durable.unwrap();
    disk.inject_next(Operation::Sync, Fault::Revert);
    let held = disk.hold(Operation::Sync);
    let syncing = thread::spawn({
        let disk = disk.clone();
        move || disk.sync().map_err(|error| error.raw_os_error())
    });
    held.wait();
    disk.write(2 * SIZE as u64, &[5; SIZE]).unwrap();
    drop(held);
    assert_eq!(syncing.join().unwrap(), Err(Some(libc::EIO)));
    assert_eq!([1, 2, 3].map(|block| on_disk(&disk, block)), [2, 5, 4]);
    assert!(disk.sync().is_ok(), "it is told once");
}
