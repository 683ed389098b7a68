//! A get that needs a buffer finds one, unless every buffer is pinned, or dirty and cannot be written.

use std::thread;
use std::time::Duration;

use bufcache::{AttachOptions, Cache, Device, Eviction, GetError, MemoryDevice, Pin};
use bufcache_test::{Fault, FaultDevice, Operation};

const SIZE: usize = 512;
const POLICIES: [Eviction; 3] = [Eviction::Adaptive, Eviction::A2, Eviction::Clock];

/// A full cache of `buffers` buffers that does not wait for one, and its device.
fn full(eviction: Eviction, buffers: u64) -> (Cache, Device) {
    let builder = Cache::builder(buffers as usize * SIZE).block_size(SIZE);
    let cache = builder.eviction(eviction).patience(Duration::ZERO).build().unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![7; 4 * buffers as usize * SIZE])).unwrap();
    (0..buffers).for_each(|block| drop(disk.get(block).unwrap()));
    (cache, disk)
}

fn pin(disk: &Device, block: u64) -> Pin {
    disk.get(block).unwrap().pin().unwrap()
}

/// The table of a later cache may have the address of a dropped one.
#[test]
fn inv26_a_guard_that_was_forgotten_with_its_cache_keeps_no_buffer_of_another() {
    for round in 0..20 {
        let (cache, disk) = full(Eviction::Adaptive, 640);
        (0..640).for_each(|block| assert_eq!(disk.get_mut(block).err().map(drop), None, "{round}"));
        let got = thread::scope(|scope| {
            let other = scope.spawn(|| disk.get_mut(3).map(drop));
            other.join().unwrap()
        });
        assert_eq!(got, Ok(()), "{round}");
        disk.sync().unwrap();
        (640..1280).for_each(|block| assert_eq!(disk.get(block).err(), None, "{round}"));
        (1280..1920).for_each(|block| std::mem::forget(disk.get(block).unwrap()));
        drop((disk, cache));
    }
}

#[test]
fn inv26_one_buffer_is_found_behind_thousands_that_are_pinned() {
    for eviction in POLICIES {
        for free in [0, 2000, 4999] {
            let (_cache, disk) = full(eviction, 5000);
            let mut pins: Vec<_> = (0..5000).map(|block| pin(&disk, block)).collect();
            assert_eq!(disk.get(5000).err(), Some(GetError::NoFreeBuffers));
            drop(pins.swap_remove(free));
            let got = disk.get(5000).map(|guard| guard[0]);
            assert_eq!(got, Ok(7), "{eviction:?}: buffer {free} is free");
        }
    }
}

#[test]
fn inv26_a_stale_buffer_is_freed_behind_others_that_are_pinned() {
    for free in [0, 50, 99] {
        let (_cache, disk) = full(Eviction::A2, 100);
        let mut pins: Vec<_> = (0..100).map(|block| pin(&disk, block)).collect();
        (0..100).for_each(|block| assert_eq!(disk.invalidate(block), Ok(true)));
        drop(pins.swap_remove(free));
        assert_eq!(disk.get(100).map(|guard| guard[0]), Ok(7), "buffer {free} is free");
    }
}

/// The device refuses the older half of the dirty blocks.
#[test]
fn inv26_dirty_buffers_are_written_behind_older_ones_that_cannot_be() {
    const BUFFERS: u64 = 128;
    let builder = Cache::builder(BUFFERS as usize * SIZE).block_size(SIZE);
    let builder = builder.write_back_after(Duration::from_secs(3600)).dirty_limits(100, 100);
    let cache = builder.patience(Duration::from_millis(100)).build().unwrap();
    let disk = FaultDevice::new(MemoryDevice::new(vec![7; 2 * BUFFERS as usize * SIZE]));
    let refused = 0..BUFFERS / 2 * SIZE as u64;
    disk.inject_at(Operation::Write, refused, Fault::Error(libc::EIO));
    let options = AttachOptions::new().on_loss(|_| {});
    let disk = cache.attach_with(disk, options).unwrap();
    (0..BUFFERS).for_each(|block| disk.get_mut(block).unwrap().fill(2));
    for block in BUFFERS..BUFFERS + 8 {
        assert_eq!(disk.get(block).map(|guard| guard[0]), Ok(7));
    }
}
