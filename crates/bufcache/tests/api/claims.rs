//! Blocks that are read and written by other means than the cache's: claims and invalidations.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

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
    let waits = thread::spawn({
        let disk = disk.clone();
        move || disk.get(3).map(|block| block[0])
    });
    while cache.stats().waited == 0 {
        thread::yield_now();
    }
    load.fill(9);
    load.finish(Ok(SIZE));
    assert_eq!(waits.join().unwrap(), Ok(9), "who waits has what the claim brought");
    assert_eq!(disk.get(3).unwrap()[SIZE - 1], 9);
    assert!(disk.claim(3).unwrap().is_none(), "it is there");
    assert_eq!(cache.stats().misses, 1);
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

/// Threads that change blocks beside the cache and forget them, and others that claim them, as a server
/// does: after an invalidation no older value is seen.
#[test]
fn inv10_no_get_after_an_invalidation_sees_what_was_before() {
    const BLOCKS: usize = 3;
    const ROUNDS: u64 = 2_000;
    let (_cache, disk) = world(2, BLOCKS);
    // The device itself, and what every reader has to see at least.
    let device: [AtomicU64; BLOCKS] = Default::default();
    let forgotten: [AtomicU64; BLOCKS] = Default::default();
    let (stop, hits) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for reader in 0..2 {
            let (disk, device, forgotten) = (&disk, &device, &forgotten);
            let (stop, hits) = (&stop, &hits);
            scope.spawn(move || {
                for round in reader.. {
                    if stop.load(Relaxed) == 1 {
                        return;
                    }
                    let block = round % BLOCKS;
                    let least = forgotten[block].load(Acquire);
                    if let Ok(guard) = disk.try_get(block as u64) {
                        let value = u64::from_ne_bytes(guard[..8].try_into().unwrap());
                        assert!(value >= least, "block {block}: {value}, and {least} was told");
                        hits.fetch_add(1, Relaxed);
                    } else if let Some(mut load) = disk.claim(block as u64).unwrap() {
                        let value = device[block].load(Acquire);
                        thread::yield_now(); // time passes between the read and its end
                        load[..8].copy_from_slice(&value.to_ne_bytes());
                        load.finish(Ok(SIZE));
                    }
                }
            });
        }
        let begin = Instant::now();
        for value in 1.. {
            // On a busy machine the readers may not have had their turns yet.
            let enough = hits.load(Relaxed) > 0 || begin.elapsed() > Duration::from_secs(60);
            if value > ROUNDS && enough {
                break;
            }
            let block = value as usize % BLOCKS;
            device[block].store(value, Release);
            disk.invalidate(block as u64).unwrap();
            forgotten[block].store(value, Release);
        }
        stop.store(1, Relaxed);
    });
    assert!(hits.into_inner() > 0, "nothing was ever there");
}
