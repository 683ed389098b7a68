//! Writers against readers, evictors, the device and the log; syncs and durable writes against write-back.

use std::time::Duration;

use crate::{Device, GetError, WriteGuard};
use offlock_sync::atomic::Ordering::Relaxed;
use offlock_sync::{model, thread};

use super::disk::{Disk, fill, of, small, world};
use super::task::block_on;
use super::world::{SIZE, beside, dawdle, neighbours, race, thoroughly};

/// Fails unless a sync makes a block of these bytes durable. The first one may tell of an earlier error.
fn becomes_durable(disk: &Disk, device: &Device, byte: u8) {
    let _earlier = device.sync();
    device.sync().unwrap();
    assert_eq!(disk.durable(0), byte);
}

#[test]
fn inv15_a_writer_against_a_reader() {
    thoroughly(|| {
        let (_disk, device) = world();
        drop(device.get(0).unwrap());
        let reads = |device: Device| {
            if let Ok(guard) = device.try_get(0) {
                let first = guard[0];
                dawdle();
                assert!(guard.iter().all(|byte| *byte == first));
            }
        };
        race(&device, |device| fill(device, 0, 1), reads);
        assert_eq!(device.get(0).unwrap()[0], 1);
    });
}

/// A getter that finds a block in creation waits for the guard, and not longer than the cache's patience.
#[test]
fn inv15_a_getter_against_a_creator() {
    model(|| against_a_creator(Device::try_create, |device| device.get(0).map(drop)));
}

#[test]
fn inv15_a_task_against_a_creator() {
    let get = |device: &Device| block_on(device.get_async(0)).map(drop);
    model(move || against_a_creator(Device::create, get));
}

fn against_a_creator(
    create: fn(&Device, u64) -> Result<WriteGuard<'_>, GetError>,
    get: fn(&Device) -> Result<(), GetError>,
) {
    let (_disk, device) = of(small(2).patience(Duration::ZERO));
    let gets = beside(&device, move |device| {
        if device.is_cached(0) {
            assert_eq!(get(&device), Err(GetError::Busy));
        }
    });
    let guard = create(&device, 0).unwrap();
    gets.join().unwrap();
    drop(guard);
}

#[test]
fn inv15_a_writer_against_a_guard_that_becomes_a_pin() {
    thoroughly(|| {
        a_guard_becomes_a_pin(|| {
            thread::yield_now(); // the writer's turn, which loom need not find
            dawdle();
        });
    });
}

/// Between the mark of a writer that does not wait and its look at the guards.
#[test]
fn inv15_a_writer_against_a_guard_that_becomes_a_pin_at_once() {
    thoroughly(|| a_guard_becomes_a_pin(|| ()));
}

fn a_guard_becomes_a_pin(wait: fn()) {
    let (_disk, device) = world();
    drop(device.get(0).unwrap());
    let reads = beside(&device, move |device| {
        let Ok(guard) = device.try_get(0) else { return };
        let first = guard[0];
        wait();
        let pin = guard.pin().unwrap();
        drop(guard);
        thread::yield_now();
        dawdle();
        assert!(pin.iter().all(|byte| *byte == first));
    });
    fill(&device, 0, 1);
    reads.join().unwrap();
    assert_eq!(device.get(0).unwrap()[0], 1);
}

#[test]
fn inv15_a_reader_that_waits_for_a_writer_is_woken() {
    thoroughly(|| {
        let (_disk, device) = world();
        let mut guard = device.get_mut(0).unwrap();
        let reads = beside(&device, |device| assert_eq!(device.get(0).unwrap()[0], 1));
        dawdle();
        guard.fill(1);
        drop(guard);
        reads.join().unwrap();
    });
}

/// A task's write-back waits for a writer, without a thread.
#[cfg(offlock_shuttle)] // more than loom does in a minute
#[test]
fn inv15_a_task_that_waits_for_a_writer_is_woken() {
    model(|| {
        let (disk, device) = world();
        fill(&device, 0, 1);
        let writes = beside(&device, |device| fill(&device, 0, 2));
        thread::yield_now();
        super::task::block_on(device.sync_async()).unwrap();
        assert!(disk.durable(0) > 0);
        writes.join().unwrap();
        super::task::block_on(device.sync_async()).unwrap();
        assert_eq!(disk.durable(0), 2);
    });
}

#[test]
fn inv15_a_writer_against_the_device() {
    thoroughly(|| {
        let (disk, device) = world();
        fill(&device, 0, 1);
        race(&device, |device| fill(device, 0, 2), |device| device.flush().unwrap());
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 2);
    });
}

/// Whichever thread writes the block, it is durable once the call has returned.
#[test]
fn inv20_a_sync_against_the_cleaner() {
    against_the_cleaner(|device| {
        dawdle();
        device.sync().unwrap();
    });
}

#[test]
fn inv20_a_durable_write_against_the_cleaner() {
    against_the_cleaner(|device| device.write_through(0..1).unwrap());
}

fn against_the_cleaner(make_durable: fn(&Device)) {
    model(move || {
        let (disk, device) = world();
        fill(&device, 0, 1);
        let flushes = beside(&device, |device| device.flush().unwrap());
        make_durable(&device);
        assert_eq!(disk.durable(0), 1);
        flushes.join().unwrap();
    });
}

#[test]
fn inv20_a_sync_that_runs_is_not_enough() {
    model(|| {
        let (disk, device) = world();
        let syncs = beside(&device, |device| device.sync().unwrap());
        fill(&device, 0, 1);
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 1);
        syncs.join().unwrap();
    });
}

/// A sync fails that may have met the block or not: a reset finds it, wherever it is.
#[test]
fn inv18_a_reset_against_the_cleaner() {
    model(|| {
        let (disk, device) = world();
        disk.giving_up.store(1, Relaxed);
        disk.lingers.store(16, Relaxed);
        let fails = beside(&device, |device| {
            assert!(device.sync().is_err());
            assert!(device.reset().unwrap().is_empty(), "it is cached");
        });
        if let Ok(mut guard) = device.get_mut(0) {
            guard.fill(1);
            drop(guard);
            let _ = device.flush(); // it may be poisoned
        }
        fails.join().unwrap();
        fill(&device, 1, 1);
        let _earlier = device.sync();
        device.sync().unwrap();
        let there = device.get(0).unwrap()[0];
        assert_eq!(disk.durable(0), there);
    });
}

/// It evicts the block that the reset is about to make dirty, and has another one in its place.
#[test]
fn inv18_a_reset_against_an_evictor() {
    model(|| {
        let (disk, device) = of(small(1));
        fill(&device, 0, 1);
        device.flush().unwrap();
        disk.giving_up.store(1, Relaxed);
        assert!(device.sync().is_err());
        let evicts = beside(&device, |device| {
            let [other] = neighbours(1);
            if let Some(mut load) = device.claim(other).unwrap() {
                load.fill(0);
                load.finish(Ok(SIZE));
            }
        });
        let lost = device.reset().unwrap();
        evicts.join().unwrap();
        if lost.is_empty() {
            becomes_durable(&disk, &device, 1);
        }
    });
}

/// One that ends late does not forget the sync that failed behind the other.
#[test]
fn inv18_two_resets() {
    thoroughly(|| {
        let (disk, device) = world();
        fill(&device, 0, 1);
        disk.giving_up.store(1, Relaxed);
        assert!(device.sync().is_err());
        let other =
            beside(&device, |device| assert!(device.reset().unwrap().is_empty(), "it is cached"));
        thread::yield_now();
        dawdle();
        assert!(device.reset().unwrap().is_empty());
        disk.giving_up.store(1, Relaxed);
        assert!(device.sync().is_err());
        other.join().unwrap();
        assert!(device.reset().unwrap().is_empty());
        becomes_durable(&disk, &device, 1);
    });
}

#[test]
fn inv17_a_write_that_fails() {
    thoroughly(|| {
        let (disk, device) = world();
        disk.failing.store(2, Relaxed);
        fill(&device, 0, 1);
        assert!(device.flush().is_err());
        for block in 1..4 {
            drop(device.get(block));
        }
        assert_eq!(device.get(0).unwrap()[0], 1);
        becomes_durable(&disk, &device, 1);
    });
}

#[test]
fn inv19_a_writer_against_a_close() {
    thoroughly(|| against_a_close(true, Device::get_mut));
}

#[test]
fn inv19_a_creator_against_a_close() {
    thoroughly(|| against_a_close(false, Device::create));
}

/// What a writer was let write is durable once the close says so.
fn against_a_close(
    is_there: bool,
    write: impl Fn(&Device, u64) -> Result<WriteGuard<'_>, GetError> + Send + 'static,
) {
    let (disk, device) = world();
    if is_there {
        drop(device.get(0).unwrap());
    }
    let writes = beside(&device, move |device| match write(&device, 0) {
        Ok(mut guard) => {
            guard.fill(1);
            thread::yield_now(); // the turn of the thread that closes, which loom need not find
            dawdle();
            1
        }
        Err(error) => {
            assert_eq!(error, GetError::Closed);
            0
        }
    });
    let _kept = device.clone(); // the end of the last handle would write it
    if is_there {
        dawdle();
    }
    device.close().unwrap();
    let durable = disk.durable(0);
    assert_eq!(durable, writes.join().unwrap());
}

/// A buffer that is written after an evictor has met it dirty is the next victim, whatever another
/// evictor does meanwhile.
#[test]
fn a_buffer_that_was_due_is_evicted_once_written() {
    model(|| {
        let (_disk, device) = of(small(4));
        let get = |block: u64| drop(device.get(block).unwrap());
        fill(&device, 0, 1);
        (1..=4).for_each(get); // the last one needs a buffer: 0 is due, and 1 is evicted
        assert!(device.is_cached(0));
        let writes = beside(&device, |device| device.flush().unwrap());
        get(5);
        writes.join().unwrap();
        get(6);
        assert!(!device.is_cached(0));
    });
}

/// A miss evicts the only buffer either before the writer has dirtied it, or once the device has the
/// bytes.
#[test]
fn inv15_a_writer_against_an_evictor() {
    model(|| {
        let (disk, device) = of(small(1));
        drop(device.get(0).unwrap());
        race(&device, |device| fill(device, 0, 1), |device| drop(device.get(1).unwrap()));
        assert_eq!(device.get(0).unwrap()[0], 1);
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 1);
    });
}

/// While the log is flushed for a block, that is written once more, and needs more of the log.
#[test]
fn inv16_the_log_against_a_writer() {
    thoroughly(|| {
        let (disk, device) = world();
        disk.logs.store(true, Relaxed);
        let logged = |byte: u8| {
            let mut guard = device.get_mut(0).unwrap();
            guard.set_lsn(byte.into());
            guard.fill(byte);
        };
        logged(1);
        let flushes = beside(&device, |device| device.flush().unwrap());
        logged(2);
        flushes.join().unwrap();
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 2);
    });
}

/// A flush ends while a sync of the device runs. The sync does not make its block durable, so a
/// durable write of the block, which finds it clean, syncs the device again.
#[test]
fn inv20_what_is_flushed_during_a_sync() {
    model(|| {
        let (disk, device) = world();
        let syncs = beside(&device, |device| device.sync().unwrap());
        fill(&device, 0, 1);
        device.flush().unwrap();
        syncs.join().unwrap();
        device.write_through(0..1).unwrap();
        assert_eq!(disk.durable(0), 1);
    });
}

/// Of two at a time the device fails one, and gives up what was written before: what a sync has
/// said of is there.
#[test]
fn inv18_a_sync_beside_one_that_fails() {
    model(|| {
        let (disk, device) = world();
        disk.giving_up.store(1, Relaxed);
        fill(&device, 0, 1);
        let (synced, other) =
            race(&device, |device| device.sync().is_ok(), |device| device.sync().is_ok());
        assert!(!synced && !other || disk.durable(0) == 1);
        assert!(!synced || !other, "one has failed");
        // The other has forgotten nothing of what the device gave up.
        assert!(device.reset().unwrap().is_empty(), "it is cached");
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 1);
    });
}

/// Between the write-back of a sync and its call of the device, another sync fails, which loses the block, and
/// a reset makes it dirty again. Then neither a sync nor a durable write may vouch for it.
#[test]
fn inv18_a_sync_against_one_that_fails_and_a_reset() {
    against_a_reset(|device| device.sync().is_ok());
}

#[test]
fn inv18_a_durable_write_against_a_sync_that_fails_and_a_reset() {
    against_a_reset(|device| device.flush().is_ok() && device.write_through(0..1).is_ok());
}

fn against_a_reset(makes_durable: fn(&Device) -> bool) {
    model(move || {
        let (disk, device) = world();
        disk.giving_up.store(1, Relaxed);
        fill(&device, 0, 1);
        let resets = beside(&device, |device| {
            device.sync().is_ok() || device.reset().is_ok_and(|lost| lost.is_empty())
        });
        let is_durable = makes_durable(&device);
        assert!(!is_durable || disk.durable(0) == 1, "it is dirty");
        assert!(resets.join().unwrap(), "it is cached");
        let _ = device.reset().unwrap();
        becomes_durable(&disk, &device, 1);
    });
}
