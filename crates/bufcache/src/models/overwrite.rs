//! A change of the device beside the cache, against all other uses of the block: a discard, or by means of its
//! own below a bypass or before an invalidation.

use std::io;
use std::sync::Arc;

use crate::{BlockDevice, Change, Device, DeviceChange, WriteError};
use offlock_sync::atomic::{AtomicU64, Ordering::Relaxed};
use offlock_sync::{Mutex, model, thread};

use super::disk::{Disk, fill, world};
use super::task::{Alarm, begin};
use super::world::{BLOCKS, LONG, SIZE, attach, beside, builder, dawdle, race, thoroughly};

/// Each byte is the number of changes. As the memory of a real device, it orders no other access.
struct Changing {
    changes: Arc<AtomicU64>,
    /// Held by a model while no discard is to end.
    gate: Arc<Mutex<()>>,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Changing {
    fn attach(buffers: usize) -> (Arc<Self>, Device) {
        let changing = Arc::new(Self {
            changes: Arc::new(AtomicU64::new(0)),
            gate: Arc::default(),
            threads: Mutex::new(Vec::new()),
        });
        let device = attach(builder(buffers, LONG), &changing);
        (changing, device)
    }

    /// Changes the device below a bypass. Returns whether there was one.
    fn change_by_bypass(&self, device: &Device) -> bool {
        let Some(bypass) = device.try_bypass(0..1).unwrap() else { return false };
        dawdle();
        self.changes.store(1, Relaxed);
        bypass.finish(Ok(())).unwrap();
        true
    }

    fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

impl BlockDevice for Changing {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill(self.changes.load(Relaxed) as u8);
        dawdle();
        Ok(buf.len())
    }

    /// Another thread discards: it changes the device, and ends then.
    fn begin(&self, change: DeviceChange) {
        if !matches!(change.change(), Change::Discard { .. }) {
            return change.defer();
        }
        let (changes, gate) = (Arc::clone(&self.changes), Arc::clone(&self.gate));
        self.threads.lock().push(thread::spawn(move || {
            dawdle();
            drop(gate.lock());
            changes.store(1, Relaxed);
            change.finish(Ok(()));
        }));
    }
}

/// An invalidation that sleeps until the load is over: the loaded bytes are new, or are dropped.
#[test]
fn inv10_a_claim_against_invalidate() {
    model(|| {
        let both = Changing::attach(1);
        let claims = beside(&both, |(changing, device)| {
            if let Some(mut load) = device.claim(0).unwrap() {
                load.fill(changing.changes.load(Relaxed) as u8);
                dawdle();
                load.finish(Ok(SIZE));
            }
        });
        let (changing, device) = both;
        dawdle();
        changing.changes.store(1, Relaxed);
        device.invalidate(0).unwrap();
        assert_eq!(device.get(0).unwrap()[0], 1);
        claims.join().unwrap();
    });
}

/// A load that begins before the bypass refuses it, and one that begins later reads the new bytes. Old bytes
/// that were cached would stay.
#[test]
fn inv10_a_bypass_against_a_load() {
    model(|| {
        let (changing, device) = Changing::attach(1);
        let reads = |device: Device| drop(device.get(0).unwrap());
        let (is_changed, ()) = race(&device, |device| changing.change_by_bypass(device), reads);
        assert_eq!(device.get(0).unwrap()[0], u8::from(is_changed));
    });
}

/// There is one buffer: a guard that has it keeps the new bytes from it.
#[test]
fn inv10_a_bypass_against_a_hit() {
    model(|| {
        let (changing, device) = Changing::attach(1);
        drop(device.get(0).unwrap());
        let hits = beside(&device, |device| {
            if let Ok(guard) = device.try_get(0) {
                let first = guard[0];
                (0..4).for_each(|_| dawdle());
                assert!(guard.iter().all(|byte| *byte == first));
            }
        });
        let is_changed = changing.change_by_bypass(&device);
        assert_eq!(device.get(0).unwrap()[0], u8::from(is_changed));
        hits.join().unwrap();
    });
}

/// The buffer of the block is evicted meanwhile, and read again.
#[test]
fn inv10_a_bypass_against_an_evictor() {
    model(|| {
        let (changing, device) = Changing::attach(1);
        drop(device.get(0).unwrap());
        let evicts = beside(&device, |device| drop(device.get(1).unwrap()));
        let is_changed = changing.change_by_bypass(&device);
        evicts.join().unwrap();
        assert_eq!(device.get(0).unwrap()[0], u8::from(is_changed));
        drop(device.get(1).unwrap());
    });
}

/// A task discards a block, and is gone before the device has done it. A get waits for the device all the same.
#[test]
fn inv23_a_discard_goes_on_when_its_task_is_gone() {
    thoroughly(|| {
        let (changing, device) = Changing::attach(1);
        let mut discards = Box::pin(device.discard_async(0..1));
        let alarm = Arc::new(Alarm::default());
        let closed = changing.gate.lock();
        assert!(begin(&mut discards, &alarm));
        drop(discards);
        assert_eq!(Arc::strong_count(&alarm), 1, "its waker is kept");
        drop(closed);
        assert_eq!(device.get(0).unwrap()[0], 1);
        changing.join();
    });
}

/// Writes a byte to block 0 below a bypass. Returns whether there was one.
fn bypass(disk: &Disk, device: &Device, byte: u8) -> Result<bool, WriteError> {
    let Some(bypass) = device.try_bypass(0..1)? else { return Ok(false) };
    let written = disk.write(0, &[byte; SIZE]);
    bypass.finish(written).map(|()| true)
}

/// The device is written to by one of the two at a time, and the bypass is the later one.
#[test]
fn inv15_a_bypass_against_write_back() {
    thoroughly(|| {
        let (disk, device) = world();
        fill(&device, 0, 1);
        let flushes = beside(&device, |device| device.flush().unwrap());
        let last = if bypass(&disk, &device, 2).unwrap() { 2 } else { 1 };
        flushes.join().unwrap();
        assert_eq!(device.get(0).unwrap()[0], last);
        device.sync().unwrap();
        assert_eq!(disk.durable(0), last);
    });
}

#[test]
fn inv15_a_bypass_against_a_writer() {
    against_a_writer(false, |disk, device| _ = bypass(disk, device, 2).unwrap());
}

#[test]
fn inv15_two_bypasses() {
    thoroughly(|| {
        let world = world();
        let write = |world: &(Arc<Disk>, Device)| bypass(&world.0, &world.1, 1).unwrap();
        let (one, two) = race(&world, write, move |world| write(&world));
        assert!(one || two);
    });
}

/// A sync that began before the end of the bypass does not make it durable: a durable write of the block does,
/// and if a later sync fails, the block is among those that it may have lost.
#[test]
fn inv20_a_bypass_against_a_sync() {
    against_a_sync(|disk, device| assert!(bypass(disk, device, 1).unwrap()));
}

/// The same of a write past the cache.
#[test]
fn inv20_a_write_around_against_a_sync() {
    against_a_sync(|_, device| device.write_around(0, &[1; SIZE]).unwrap());
}

fn against_a_sync(write: fn(&Disk, &Device)) {
    for through in [false, true] {
        model(move || {
            let (disk, device) = world();
            let syncs = beside(&device, |device| device.sync().unwrap());
            write(&disk, &device);
            syncs.join().unwrap();
            if through {
                device.write_through(0..1).unwrap();
                return assert_eq!(disk.durable(0), 1);
            }
            disk.giving_up.store(1, Relaxed);
            assert!(device.sync().is_err());
            let lost = device.reset().unwrap();
            assert!(disk.durable(0) == 1 || lost.blocks() == [0..1]);
        });
    }
}

/// A close waits for the end of the bypass and makes it durable, or refuses it.
#[test]
fn inv19_a_bypass_against_a_close() {
    thoroughly(|| {
        let world = world();
        let writes = beside(&world, |(disk, device)| match bypass(&disk, &device, 1) {
            Ok(is_written) => u8::from(is_written),
            Err(error) => {
                assert_eq!(error, WriteError::Closed);
                0
            }
        });
        let (disk, device) = world;
        let _kept = device.clone(); // the end of the last handle would write it
        device.close().unwrap();
        let durable = disk.durable(0);
        assert_eq!(durable, writes.join().unwrap());
    });
}

/// What was dirty is written before it is discarded, or never.
#[test]
fn inv15_a_discard_against_write_back() {
    model(|| {
        let (disk, device) = world();
        fill(&device, 0, 1);
        let flushes = beside(&device, |device| device.flush().unwrap());
        device.discard(0..1).unwrap();
        assert_eq!(device.get(0).unwrap()[0], 0);
        flushes.join().unwrap();
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 0);
    });
}

#[test]
fn inv15_a_discard_against_a_writer() {
    against_a_writer(true, |_, device| device.discard(0..1).unwrap());
}

/// One comes behind the other.
fn against_a_writer(is_cached: bool, change: fn(&Disk, &Device)) {
    model(move || {
        let (disk, device) = world();
        if is_cached {
            drop(device.get(0).unwrap());
        }
        let writes = beside(&device, |device| {
            fill(&device, 0, 1);
            device.sync().unwrap();
        });
        change(&disk, &device);
        writes.join().unwrap();
        device.sync().unwrap();
        assert_eq!(disk.durable(0), device.get(0).unwrap()[0]);
    });
}

/// A block that is read once a discard is over may have come back changed: after a sync that fails it is lost,
/// whether it is cached or not.
#[test]
fn inv24_a_load_after_a_discard() {
    model(|| {
        let (disk, device) = world();
        disk.giving_up.store(1, Relaxed);
        let reads = beside(&device, |device| drop(device.get(0).unwrap()));
        device.discard(0..1).unwrap();
        reads.join().unwrap();
        device.sync().unwrap_err();
        assert_eq!(device.reset().unwrap().blocks(), [0..1]);
    });
}
