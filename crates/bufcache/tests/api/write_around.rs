//! Calls that must not wait, and calls that bypass the cache.

use crate::world::*;

#[test]
fn inv07_a_try_that_would_wait_for_dirty_blocks_is_refused() {
    let builder = Cache::builder(16 * SIZE).block_size(SIZE).dirty_limits(100, 50);
    let cache = builder.write_back_after(std::time::Duration::from_secs(3600)).build().unwrap();
    let device = cache.attach(MemoryDevice::new(vec![0; 64 * SIZE])).unwrap();
    for block in 0..9 {
        device.try_create(block).unwrap()[0] = 1;
    }
    let before = cache.stats();
    assert_eq!(device.try_create(9).err(), Some(GetError::WouldBlock));
    let after = cache.stats();
    assert_eq!((after.get, after.busy), (before.get + 1, before.busy + 1));
    device.flush_range(0..1).unwrap();
    device.try_create(9).unwrap()[0] = 1;
}

#[test]
fn the_cache_says_where_the_device_is_older() {
    let (_cache, device, disk) = new();
    drop(device.get(1).unwrap());
    assert!(!device.is_newer(0..64));
    fill(&device, 3, 7);
    assert!(device.is_newer(0..64) && device.is_newer(3..4) && device.is_newer(0..u64::MAX));
    assert!(!device.is_newer(0..3) && !device.is_newer(4..64) && !device.is_newer(3..3));
    let guard = device.get_mut(3).unwrap();
    assert!(device.is_newer(3..4), "written before, and once more");
    drop(guard);
    device.flush().unwrap();
    assert!(!device.is_newer(0..64));
    // What a failed sync may have lost.
    disk.inject_next(Operation::Sync, Fault::Error(libc::EIO));
    device.sync().unwrap_err();
    assert!(device.is_newer(3..4) && !device.is_newer(0..3));
    let _ = device.reset().unwrap();
    assert!(device.is_newer(3..4), "dirty again");
    device.sync().unwrap();
    assert!(!device.is_newer(0..64));
}

#[test]
fn a_range_is_flushed_and_no_other() {
    let (_cache, device, disk) = new();
    (0..10).for_each(|block| fill(&device, block, 7));
    device.flush_range(2..4).unwrap();
    assert_eq!((on_disk(&disk, 1), on_disk(&disk, 2), on_disk(&disk, 3)), (1, 7, 7));
    assert_eq!((on_disk(&disk, 4), disk.count(Operation::Write)), (1, 2));
    device.flush_range(2..4).unwrap();
    assert_eq!(disk.count(Operation::Write), 2);
    disk.inject_next(Operation::Write, Fault::Error(libc::ENOSPC));
    let full = WriteError::Io { errno: libc::ENOSPC, block: 5 };
    assert_eq!(device.flush_range(5..6), Err(full));
    assert_eq!((device.get(5).unwrap()[0], device.is_newer(5..6)), (7, true));
    device.flush_range(0..64).unwrap();
    assert_eq!((on_disk(&disk, 0), on_disk(&disk, 5), on_disk(&disk, 9)), (7, 7, 7));
}

#[test]
fn what_is_written_past_the_cache_is_on_the_device_and_is_what_is_read() {
    let (_cache, device, disk) = new();
    fill(&device, 3, 7); // dirty
    drop(device.get(4).unwrap()); // clean
    device.write_around(2, &[9; 4 * SIZE]).unwrap();
    assert!(!device.is_newer(0..64) && (2..6).all(|block| on_disk(&disk, block) == 9));
    assert!((2..6).all(|block| device.get(block).unwrap()[0] == 9));
    assert_eq!((device.get(1).unwrap()[0], device.get(6).unwrap()[0]), (1, 1));
    device.sync().unwrap();
    assert_eq!(disk.count(Operation::Write), 1, "what was dirty is not written over it");
    device.write_around(64, &[]).unwrap();
    for (first, len) in [(0, SIZE - 1), (0, 1), (63, SIZE + 1), (63, 2 * SIZE), (64, SIZE)] {
        let result = device.write_around(first, &vec![2; len]);
        assert_eq!(result, Err(WriteError::OutOfRange), "{first}, {len}");
    }
    assert_eq!(device.write_around(u64::MAX, &[2; SIZE]), Err(WriteError::OutOfRange));
    assert_eq!(disk.count(Operation::Write), 1);
}

#[test]
fn the_last_block_is_as_long_as_the_device() {
    let cache = Cache::builder(16 * SIZE).block_size(SIZE).build().unwrap();
    let disk = Arc::new(MemoryDevice::new(vec![1; 3 * SIZE + 100]));
    let device = cache.attach(Arc::clone(&disk)).unwrap();
    fill(&device, 3, 7);
    device.write_around(2, &[9; SIZE + 100]).unwrap();
    let mut there = vec![0; 3 * SIZE + 100];
    disk.read(0, &mut there).unwrap();
    assert!(there[..2 * SIZE].iter().all(|byte| *byte == 1));
    assert!(there[2 * SIZE..].iter().all(|byte| *byte == 9));
    assert_eq!(device.get(3).unwrap()[99..102], [9, 0, 0]);
    assert_eq!(device.write_around(3, &[9; 99]), Err(WriteError::OutOfRange));
    assert_eq!(device.write_around(3, &[9; SIZE]), Err(WriteError::OutOfRange));
}

#[test]
fn an_empty_bypass_excludes_nothing() {
    let (_cache, device, _disk) = new();
    let empty = [3, 3, 5].map(|at| device.try_bypass(at..at).unwrap().expect("no block"));
    let around = device.try_bypass(0..10).unwrap().expect("no block is excluded");
    let inside = device.try_bypass(4..4).unwrap().expect("no block");
    empty.into_iter().for_each(|bypass| bypass.finish(Ok(())).unwrap());
    assert!(device.try_bypass(9..10).unwrap().is_none(), "the other one goes on");
    around.finish(Ok(())).unwrap();
    inside.finish(Ok(())).unwrap();
    device.discard(0..10).unwrap();
}
