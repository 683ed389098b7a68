//! A thread that waits for a sync that fails gets no success from the next one; the results of a
//! reset.

use std::sync::atomic::Ordering;

use crate::world::*;

/// Larger than any disk: zeros, in which nothing stays.
#[derive(Default)]
struct Vast {
    fails: AtomicBool,
    /// It discards nothing.
    keeps: AtomicBool,
}

impl BlockDevice for Vast {
    fn len(&self) -> u64 {
        1 << 56
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill(0);
        Ok(buf.len())
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        let keeps = self.keeps.load(Ordering::Relaxed);
        if keeps { Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)) } else { Ok(()) }
    }

    fn sync(&self) -> io::Result<()> {
        let fails = self.fails.swap(false, Ordering::Relaxed);
        if fails { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }
}

fn vast() -> (Arc<Vast>, bufcache::Device) {
    let vast = Arc::new(Vast::default());
    let cache = Cache::new(1 << 20).unwrap();
    let device = cache.attach(Arc::clone(&vast)).unwrap();
    (vast, device)
}

/// Block by block it would not end in years.
#[test]
fn inv18_a_reset_returns_a_vast_discard_as_the_ranges_it_lost() {
    let (vast, device) = vast();
    let blocks = device.blocks();
    device.discard(10..blocks - 10).unwrap();
    for block in [5, 10, 1000, 1001, 1_000_000, blocks - 11, blocks - 5] {
        device.create(block).unwrap()[0] = 1;
    }
    // Read after the discard, so it need not be zeros any more on the device.
    drop(device.get(5000).unwrap());
    device.get_mut(6000).unwrap()[0] = 1;
    device.flush().unwrap();
    vast.fails.store(true, Ordering::Relaxed);
    assert_eq!(device.sync(), POISONED);
    let lost = device.reset().unwrap();
    let kept = [10, 1000, 1001, 1_000_000, blocks - 11];
    let mut expected = Vec::new();
    let mut start = 10;
    for block in kept {
        if start < block {
            expected.push(start..block);
        }
        start = block + 1;
    }
    assert_eq!(lost.blocks(), expected);
    device.sync().unwrap();
}

/// What the device cannot do is not lost by a sync that fails.
#[test]
fn inv18_a_discard_that_the_device_does_not_know_loses_nothing() {
    let (vast, device) = vast();
    device.get_mut(3).unwrap()[0] = 1;
    device.flush().unwrap();
    drop(device.get(100).unwrap());
    vast.keeps.store(true, Ordering::Relaxed);
    let error = WriteError::Io { errno: libc::EOPNOTSUPP, block: 2 };
    assert_eq!(device.discard(2..50), Err(error));
    vast.fails.store(true, Ordering::Relaxed);
    assert_eq!(device.sync(), POISONED);
    // It was clean, and so was forgotten; and it was written.
    assert_eq!(device.reset().unwrap().blocks(), std::slice::from_ref(&(3..4)));
}

/// As above, while a sync runs that began after the discard.
#[test]
fn inv18_a_discard_that_the_device_does_not_know_loses_nothing_beside_a_sync_that_fails() {
    let (_cache, device, disk) = new();
    disk.inject_next(Operation::Discard, Fault::Error(libc::EOPNOTSUPP));
    disk.inject_next(Operation::Sync, Fault::Error(libc::EIO));
    let (discards, syncs) = (disk.hold(Operation::Discard), disk.hold(Operation::Sync));
    thread::scope(|scope| {
        let discard = scope.spawn(|| device.discard(2..5));
        discards.wait();
        let sync = scope.spawn(|| device.sync());
        syncs.wait();
        drop(discards);
        discard.join().unwrap().unwrap_err();
        drop(syncs);
        sync.join().unwrap().unwrap_err();
    });
    assert!(device.reset().unwrap().is_empty());
}

/// Any of its sectors may have changed, also if the device says that it cannot write, and after a sync that began
/// and succeeded meanwhile.
#[test]
fn inv18_a_write_past_the_cache_that_fails_is_lost() {
    const ERROR: WriteError = WriteError::Io { errno: libc::EOPNOTSUPP, block: 2 };
    const WAYS: [fn(&Device, &Disk); 3] = [
        |device, _| assert_eq!(device.write_around(2, &[9; SIZE]), Err(ERROR)),
        |device, disk| {
            let writes = disk.hold(Operation::Write);
            thread::scope(|scope| {
                let write = scope.spawn(|| device.write_around(2, &[9; SIZE]));
                writes.wait();
                device.sync().unwrap();
                drop(writes);
                assert_eq!(write.join().unwrap(), Err(ERROR));
            });
        },
        |device, _| {
            let bypass = device.try_bypass(2..3).unwrap().unwrap();
            device.sync().unwrap();
            drop(bypass);
        },
    ];
    for (number, way) in WAYS.into_iter().enumerate() {
        let (_cache, device, disk) = new();
        disk.inject_next(Operation::Write, Fault::Error(libc::EOPNOTSUPP)); // no bypass meets it
        way(&device, &disk);
        disk.inject_next(Operation::Sync, Fault::Error(libc::EIO));
        assert_eq!(device.sync(), POISONED, "{number}");
        assert_eq!(device.reset().unwrap().blocks(), std::slice::from_ref(&(2..3)), "{number}");
    }
}

/// The other waits for its turn meanwhile.
#[test]
fn inv18_of_two_that_reset_one_tells_the_loss() {
    let (_cache, device, disk) = new();
    fill(&device, 1, 2);
    fill(&device, 2, 2);
    device.flush().unwrap();
    device.invalidate(2).unwrap();
    let guard = device.get_mut(1).unwrap(); // a reset waits for it
    disk.inject_next(Operation::Sync, Fault::Error(libc::EIO));
    assert_eq!(device.sync(), POISONED);
    let told = thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| device.reset().unwrap().blocks().to_vec()));
        thread::sleep(Duration::from_millis(50));
        drop(guard);
        both.map(|one| one.join().unwrap()).concat()
    });
    assert_eq!(told, std::slice::from_ref(&(2..3)));
}
