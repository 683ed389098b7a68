//! Discards beside threads that read, write and write back what is discarded.

use offlock_sync::model;
use offlock_sync::native::atomic::Ordering::Relaxed;

use super::disk::{fill, world};
use super::task::block_on;
use super::world::{beside, thoroughly};

/// What was there is not found any more, nor by a lookup that had begun before.
#[test]
fn inv10_a_discard_against_a_load() {
    model(|| {
        let (_disk, device) = world();
        fill(&device, 0, 1);
        device.flush().unwrap();
        device.invalidate(0).unwrap();
        let reads = beside(&device, |device| assert!(device.get(0).unwrap()[0] <= 1));
        device.discard(0..1).unwrap();
        assert_eq!(device.get(0).unwrap()[0], 0);
        reads.join().unwrap();
    });
}

/// The same of a task.
#[test]
fn inv10_a_discard_against_a_task() {
    model(|| {
        let (_disk, device) = world();
        let reads =
            beside(&device, |device| assert_eq!(block_on(device.get_async(0)).unwrap()[0], 0));
        device.discard(0..1).unwrap();
        reads.join().unwrap();
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

/// One comes behind the other.
#[test]
fn inv15_a_discard_against_a_writer() {
    model(|| {
        let (disk, device) = world();
        drop(device.get(0).unwrap());
        let writes = beside(&device, |device| {
            fill(&device, 0, 1);
            device.sync().unwrap();
        });
        device.discard(0..1).unwrap();
        writes.join().unwrap();
        device.sync().unwrap();
        assert_eq!(disk.durable(0), device.get(0).unwrap()[0]);
    });
}

#[test]
fn inv15_two_discards() {
    thoroughly(|| {
        let (_disk, device) = world();
        let discards = beside(&device, |device| device.discard(0..1).unwrap());
        device.discard(0..2).unwrap();
        discards.join().unwrap();
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
