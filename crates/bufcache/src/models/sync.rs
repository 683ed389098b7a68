//! Syncs and durable writes against writers and write-back; writers against evictors and
//! the log.

use crate::Device;
use offlock_sync::model;
use offlock_sync::native::atomic::Ordering::Relaxed;

use super::disk::{fill, of, small, world};
use super::world::{beside, thoroughly};

/// A miss evicts the only buffer either before the writer has dirtied it, or once the device has the
/// bytes.
#[test]
fn inv15_a_writer_against_an_evictor() {
    model(|| {
        let (disk, device) = of(small(1));
        drop(device.get(0).unwrap());
        let evicts = beside(&device, |device| drop(device.get(1).unwrap()));
        fill(&device, 0, 1);
        evicts.join().unwrap();
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

/// The block is durable, whichever thread wrote it.
#[test]
fn inv20_a_durable_write_against_the_cleaner() {
    model(|| {
        let (disk, device) = world();
        fill(&device, 0, 1);
        let flushes = beside(&device, |device| device.flush().unwrap());
        device.write_through(0..1).unwrap();
        assert_eq!(disk.durable(0), 1);
        flushes.join().unwrap();
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
        let syncs = beside(&device, |device| device.sync().is_ok());
        let synced = device.sync().is_ok();
        let other = syncs.join().unwrap();
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
        let _earlier = device.sync();
        device.sync().unwrap();
        assert_eq!(disk.durable(0), 1);
    });
}
