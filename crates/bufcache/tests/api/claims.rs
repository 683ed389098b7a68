//! Blocks that are read and written by other means than the cache's: claims and invalidations.

use crate::world::*;

const SIZE: usize = 4096;

/// A cache of so many blocks, and a device of as many more as are asked for.
fn world(buffers: usize, blocks: usize) -> (Cache, Device) {
    let cache = Cache::builder(buffers * SIZE).build().unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![1; blocks * SIZE])).unwrap();
    (cache, disk)
}

fn claim(disk: &Device, block: u64) -> Load {
    disk.claim(block).unwrap().expect("it is not there")
}

#[test]
fn inv02_a_claim_is_a_load_that_its_holder_fills() {
    let (cache, disk) = world(8, 8);
    let mut load = claim(&disk, 3);
    assert_eq!((load.offset(), load.len()), (3 * SIZE as u64, SIZE));
    assert!(disk.claim(3).unwrap().is_none(), "somebody has it");
    assert_eq!(disk.try_get(3).unwrap_err(), GetError::WouldBlock);
    let waits = [false, true].map(|of_task| {
        let disk = disk.clone();
        thread::spawn(move || match of_task {
            true => block_on(disk.get_async(3)).map(|block| block[0]),
            false => disk.get(3).map(|block| block[0]),
        })
    });
    wait_for("both waits", || cache.stats().waited == 2);
    load.fill(9);
    load.finish(Ok(SIZE));
    let told = waits.map(|waits| waits.join().unwrap());
    assert_eq!(told, [Ok(9); 2], "who waits has what the claim brought");
    assert_eq!(disk.get(3).unwrap()[SIZE - 1], 9);
    assert!(disk.claim(3).unwrap().is_none(), "it is there");
    assert_eq!((cache.stats().misses, cache.stats().reads), (1, 1));
    assert_eq!((0..8).map(|_| cache.shrink(8)).sum::<usize>(), 1, "a pin was kept");
    let none = GetError::OutOfRange { block: 8, blocks: 8 };
    assert_eq!(disk.claim(8).unwrap_err(), none);
}

#[test]
fn a_claim_of_the_last_block_ends_where_the_device_does() {
    let cache = Cache::new(1 << 20).unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![1; SIZE + 100])).unwrap();
    let mut load = claim(&disk, 1);
    load.fill(9);
    load.finish(Ok(100));
    let block = disk.try_get(1).unwrap();
    assert!(block[..100].iter().all(|&byte| byte == 9) && block[100..].iter().all(|&b| b == 0));
}

#[test]
fn a_claim_waits_for_no_buffer() {
    let (cache, disk) = world(2, 8);
    let held = [claim(&disk, 0), claim(&disk, 1)];
    assert!(disk.claim(2).unwrap().is_none(), "both are being read");
    for load in held {
        load.finish(Ok(SIZE));
    }
    let guards = [disk.try_get(0).unwrap(), disk.try_get(1).unwrap()];
    assert!(disk.claim(2).unwrap().is_none(), "both are looked at");
    drop(guards);
    claim(&disk, 2).finish(Ok(SIZE));
    assert_eq!(cache.stats().evictions, 1);
}
