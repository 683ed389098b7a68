//! Writes of blocks: dirty and durable blocks, and the waits between writers and readers.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::world::*;

/// The patience of a call that is to be refused.
const SHORT: Duration = Duration::from_millis(300);

#[test]
fn inv14_write_back_is_ascending_merged_and_once_each() {
    let (_cache, device, disk) = new();
    disk.record().unwrap();
    for block in [9, 3, 20, 4, 5, 21, 3, 9] {
        fill(&device, block, block as u8);
    }
    device.flush().unwrap();
    let written: Vec<_> = disk
        .recorded()
        .into_iter()
        .filter(|recorded| recorded.operation == Operation::Write)
        .map(|recorded| recorded.offset / SIZE as u64)
        .collect();
    assert_eq!(written, [3, 4, 5, 9, 20, 21]);
    assert_eq!(_cache.stats().write_calls, 3, "neighbours together");
    fill(&device, 3, 99);
    device.invalidate(3).unwrap();
    device.flush().unwrap();
    assert_eq!((on_disk(&disk, 3), device.get(3).unwrap()[0]), (3, 3), "stale cancels");
}

#[test]
fn inv14_a_sync_returns_the_first_error_and_goes_on() {
    let (_cache, device, disk) = new();
    for block in 1..5 {
        fill(&device, block, 2);
    }
    let second = SIZE as u64 * 2;
    disk.inject_at(Operation::Write, second..second + 1, Fault::Error(libc::EIO));
    assert_eq!(device.sync().unwrap_err(), WriteError::Io { errno: libc::EIO, block: 2 });
    assert_eq!([1, 2, 3, 4].map(|block| on_disk(&disk, block)), [2, 1, 2, 2]);
    assert_eq!(disk.count(Operation::Sync), 1);
    disk.heal();
    device.sync().unwrap();
    assert_eq!(on_disk(&disk, 2), 2);
}

/// A call that is refused, for a reason that is not the device's, does not use up the error of
/// another call.
#[test]
fn inv17_an_error_stays_until_it_is_reported() {
    type Call = fn(&Device) -> Result<(), WriteError>;
    let calls: [Call; 5] = [
        Device::sync,
        Device::flush,
        |device| device.write_through(0..64),
        |device| block_on(device.sync_async()),
        |device| block_on(device.flush_async()),
    ];
    for call in calls {
        let (_cache, device, disk) = patient(SHORT / 10, 16, AttachOptions::new());
        let other = device.clone();
        fill(&device, 1, 2);
        disk.inject_next(Operation::Write, Fault::Error(libc::ENOSPC));
        assert!(other.flush().is_err());
        other.flush().unwrap();
        fill(&device, 9, 3);
        let guard = other.get_mut(9).unwrap();
        let refused = thread::scope(|scope| scope.spawn(|| call(&device)).join().unwrap());
        assert_eq!(refused, Err(WriteError::Busy { block: 9 }));
        drop(guard);
        let earlier = call(&device);
        assert_eq!(earlier, Err(WriteError::Earlier { errno: libc::ENOSPC }), "it was not told");
        assert_eq!(call(&device), Ok(()));
    }
}

#[test]
fn fua_makes_its_blocks_durable_and_no_others() {
    let (_cache, device, disk) = new();
    disk.record().unwrap();
    (1..5).for_each(|block| fill(&device, block, 2));
    device.write_through(2..4).unwrap();
    let after = disk.after_power_cut(disk.moments(), |_, _| 0).unwrap();
    assert_eq!([1, 2, 3, 4].map(|block| after[block * SIZE]), [1, 2, 2, 1]);
    assert!(device.is_newer(1..2) && device.is_newer(4..5), "they are dirty still");
}

#[test]
fn inv12_what_is_refused_before_a_write_is_not_written() {
    let even = |_, bytes: &[u8]| bytes[0].is_multiple_of(2);
    let (cache, device, disk) = with(16, AttachOptions::new().before_write(even));
    fill(&device, 1, 3);
    fill(&device, 2, 4);
    assert_eq!(device.sync().unwrap_err(), WriteError::Verify { block: 1 });
    assert_eq!([1, 2].map(|block| on_disk(&disk, block)), [1, 4]);
    assert_eq!(cache.stats().dirty, SIZE);
    fill(&device, 1, 6);
    device.sync().unwrap();
}

#[test]
fn inv19_dirty_buffers_are_written_when_their_memory_is_needed() {
    let (cache, device, disk) = patient(SHORT, 16, AttachOptions::new());
    for block in 0..60 {
        fill(&device, block, 2);
    }
    assert!(disk.count(Operation::Write) >= 44);
    disk.inject(Operation::Write, .., Fault::Error(libc::EIO));
    let began = Instant::now();
    let mut written = 0;
    let refused = loop {
        match device.get_mut(written) {
            Ok(mut guard) => guard.fill(3),
            Err(error) => break error,
        }
        written += 1;
    };
    assert_eq!(refused, GetError::NoFreeBuffers);
    assert!(began.elapsed() < Duration::from_secs(60));
    disk.heal();
    assert!(device.sync().is_err_and(|error| matches!(error, WriteError::Earlier { .. })));
    assert_eq!(cache.stats().dirty, 0);
    device.sync().unwrap();
    for block in 0..60 {
        assert_eq!(on_disk(&disk, block), if block < written { 3 } else { 2 }, "{block}");
    }
}

/// Those that were dirty longest are used again, and stay.
#[test]
fn a_thread_that_needs_a_buffer_writes_those_that_are_evicted_next() {
    let builder = Cache::builder(256 * SIZE).block_size(SIZE).eviction(Eviction::Clock);
    let builder = builder.write_back_after(Duration::from_secs(3600)).dirty_limits(100, 100);
    let cache = builder.build().unwrap();
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; SIZE * 512])));
    let device = cache.attach(Arc::clone(&disk)).unwrap();
    (0..256).for_each(|block| fill(&device, block, 2));
    (0..32).for_each(|block| drop(device.get(block).unwrap()));
    fill(&device, 256, 2);
    let written = (0..256).filter(|&block| on_disk(&disk, block) == 2);
    assert!(written.eq(32..96));
    let evicted = (0..256).filter(|&block| !device.is_cached(block));
    assert!(evicted.eq(32..36), "a batch, of a small cache");
}

#[test]
fn the_cleaner_writes_what_is_old_and_what_is_too_much() {
    let builder = Cache::builder(64 * SIZE).block_size(SIZE);
    let cache = builder.write_back_after(Duration::from_millis(100)).build().unwrap();
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; SIZE * 64])));
    let device = cache.attach(Arc::clone(&disk)).unwrap();
    let began = Instant::now();
    fill(&device, 1, 2);
    while on_disk(&disk, 1) != 2 {
        assert!(began.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(5));
    }
    assert!(began.elapsed() >= Duration::from_millis(100));
}

/// A writer of the whole block does not use the bytes that another thread reads.
#[test]
fn a_block_that_cannot_be_read_is_created_also_beside_its_reader() {
    let (_cache, device, disk) = new();
    disk.inject_next(Operation::Read, Fault::Delay(Duration::from_millis(200)));
    disk.inject(Operation::Read, .., Fault::Error(libc::EIO));
    let reader = thread::spawn({
        let device = device.clone();
        move || device.get(5).map(drop)
    });
    while disk.count(Operation::Read) == 0 {
        thread::yield_now();
    }
    device.create(5).unwrap().fill(7);
    assert_eq!(reader.join().unwrap(), Err(GetError::Io { errno: libc::EIO, block: 5 }));
    assert_eq!(device.get(5).unwrap()[0], 7);
}

/// What was written or discarded and not synced may be in 16,384 ranges, or in four for each buffer if that is
/// more, which the devices share: then it is synced, so that the memory for the ranges is bounded.
#[test]
fn many_unsynced_ranges_are_synced() {
    let device = |cache: &Cache| {
        let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![0; 64_000 * SIZE])));
        (cache.attach(Arc::clone(&disk)).unwrap(), disk)
    };
    let write = |device: &Device, block: u64| device.create(2 * block).unwrap().fill(1);
    let rows = [(2048, 1, 16_384, false), (6144, 1, 24_576, false), (6144, 2, 16_384, false)];
    for (buffers, devices, most, discards) in rows.into_iter().chain([(16, 1, 16_384, true)]) {
        let cache = Cache::builder(buffers * SIZE).block_size(SIZE).build().unwrap();
        let all: Vec<_> = (0..devices).map(|_| device(&cache)).collect();
        let (device, disk) = &all[0];
        let count_syncs = || {
            device.flush().unwrap();
            device.discard(60_000..60_001).unwrap(); // which looks at the ranges first
            disk.count(Operation::Sync)
        };
        let change = |block: u64| match discards {
            true => device.discard(2 * block..2 * block + 1).unwrap(),
            false => write(device, block),
        };
        (0..most - 1).for_each(change);
        assert_eq!(count_syncs(), 0, "{buffers} buffers, {devices} devices"); // it adds a range
        (most - 1..most + 1).for_each(change);
        assert_eq!(count_syncs(), 1, "{buffers} buffers, {devices} devices");
    }
    // The cleaner looks at them as well.
    let builder = Cache::builder(2048 * SIZE).block_size(SIZE);
    let cache = builder.write_back_after(Duration::ZERO).build().unwrap();
    let (device, disk) = device(&cache);
    (0..16_386).for_each(|block| write(&device, block));
    wait_for("a sync", || disk.count(Operation::Sync) == 1);
}

/// A thread that writes block after block makes them clean on its way: another one may wait for them.
#[test]
fn blocks_become_clean_while_a_thread_writes_others() {
    let mut kept = KeptDevice::new(1000 * SIZE);
    kept.depth = 256;
    kept.does(Begun::Deferred);
    let disk = Arc::new(FaultDevice::new(kept));
    let builder = Cache::builder(600 * SIZE).block_size(SIZE).dirty_limits(100, 100);
    let cache = builder.write_back_after(LONG * 60).build().unwrap();
    let device = cache.attach(Arc::clone(&disk)).unwrap();
    (0..250).for_each(|block| fill(&device, 2 * block, 1));
    // The most blocks that were written and not clean.
    let (most, cache) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Some(cache))));
    let (begun, seen, counts) = (AtomicU64::new(0), Arc::clone(&most), Arc::clone(&cache));
    disk.on_operation(move |operation, _| {
        if let (Operation::Write, Some(cache)) = (operation, &*counts.lock().unwrap()) {
            let begun = begun.fetch_add(1, Ordering::Relaxed) + 1;
            seen.fetch_max(begun - cache.stats().written, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(1));
        }
    });
    device.flush().unwrap();
    cache.lock().unwrap().take(); // it keeps the device, whose hook keeps it
    assert_eq!((disk.count(Operation::Write), most.load(Ordering::Relaxed)), (250, 32));
}

#[test]
fn a_buffer_whose_eviction_had_to_wait_for_its_write_is_evicted_next() {
    let builder = Cache::builder(64 * SIZE).block_size(SIZE).eviction(Eviction::Clock);
    let cache = builder.dirty_limits(100, 100).build().unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![0; 100 * SIZE])).unwrap();
    (0..32).for_each(|block| disk.get_mut(block).unwrap().fill(1));
    (32..64).for_each(|block| drop(disk.get(block).unwrap()));
    let cached = |blocks: Range<u64>| blocks.filter(|&block| disk.is_cached(block)).count();
    drop(disk.get(64).unwrap()); // visits all that is dirty, and evicts what is clean
    assert_eq!((cached(0..32), cached(32..64)), (32, 31));
    disk.flush().unwrap();
    (65..70).for_each(|block| drop(disk.get(block).unwrap()));
    assert_eq!((cached(0..32), cached(32..64)), (27, 31));
}
