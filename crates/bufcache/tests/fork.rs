//! A cache in a fork child: of a parent that was at rest, and of one that was reading a block.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/child.rs"]
mod child;

use std::io;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use bufcache::{BlockDevice, Cache, Device, GetError};

use child::in_child;

const SIZE: usize = 512;

/// One fork at a time: another test's threads are not to be in the middle of things.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Filled with its numbers; who reads block 7 meets the test twice.
struct Meeting(Barrier);

impl BlockDevice for Meeting {
    fn len(&self) -> u64 {
        100 * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let block = offset / SIZE as u64;
        if block == 7 {
            self.0.wait();
            self.0.wait();
        }
        buf.fill(block as u8);
        Ok(buf.len())
    }
}

fn cache() -> (Cache, Device, Arc<Meeting>) {
    let builder = Cache::builder(8 * SIZE).block_sizes(SIZE, SIZE);
    let cache = builder.patience(Duration::from_millis(30)).build().unwrap();
    let device = Arc::new(Meeting(Barrier::new(2)));
    let disk = cache.attach(Arc::clone(&device), SIZE).unwrap();
    (cache, disk, device)
}

fn reads_on(disk: &Device) -> bool {
    (10..100).all(|block| disk.get(block).is_ok_and(|guard| guard[SIZE - 1] == block as u8))
}

#[test]
fn the_child_of_a_quiet_parent_reads_on() {
    let _alone = alone();
    let (cache, disk, _device) = cache();
    let held = disk.get(1).unwrap();
    let pin = disk.get(2).unwrap().pin().unwrap();
    assert!(in_child(|| {
        assert!(disk.try_get(1).is_ok() && disk.is_cached(2));
        assert!(reads_on(&disk));
        assert_eq!(disk.invalidate(2), Ok(true));
        cache.resize(4 * SIZE).unwrap();
        (held[5], pin[5]) == (1, 2) && reads_on(&disk)
    }));
    assert!(reads_on(&disk));
    assert_eq!((held[5], pin[5]), (1, 2));
}

#[test]
fn the_child_of_a_parent_that_reads_a_block_does_not_wait_for_it() {
    let _alone = alone();
    let (_cache, disk, device) = cache();
    thread::scope(|scope| {
        let reads = scope.spawn(|| disk.get(7).unwrap()[0]);
        device.0.wait(); // it is in the device
        let held = in_child(|| {
            assert_eq!(disk.try_get(7).err(), Some(GetError::WouldBlock));
            assert_eq!(disk.get(7).err(), Some(GetError::Forked));
            assert_eq!(disk.invalidate(7), Err(GetError::Forked));
            reads_on(&disk)
        });
        device.0.wait();
        assert!(held);
        assert_eq!(reads.join().unwrap(), 7);
    });
    assert!(disk.try_get(7).is_ok());
}
