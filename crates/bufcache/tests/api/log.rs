//! Blocks whose write waits for a log.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use crate::world::*;

/// The patience of a call that is to be refused.
const SHORT: Duration = Duration::from_millis(300);

/// A log that is durable up to what it was flushed to, and tells when that was too late.
struct Log {
    durable: AtomicU64,
    fails: AtomicBool,
    flushes: Mutex<Vec<u64>>,
}

fn log(durable: u64, fails: bool) -> Arc<Log> {
    let (durable, fails) = (AtomicU64::new(durable), AtomicBool::new(fails));
    Arc::new(Log { durable, fails, flushes: Mutex::default() })
}

impl Wal for Log {
    fn durable(&self) -> u64 {
        self.durable.load(Ordering::SeqCst)
    }

    fn flush(&self, number: u64) -> std::io::Result<()> {
        self.flushes.lock().unwrap().push(number);
        if self.fails.load(Ordering::SeqCst) {
            return Err(std::io::Error::from_raw_os_error(libc::EIO));
        }
        self.durable.fetch_max(number, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn inv16_the_log_goes_before_the_blocks() {
    let log = log(5, true);
    let (_cache, device, disk) = with(16, AttachOptions::new().wal(Arc::clone(&log) as _));
    for (block, lsn) in [(1, 4), (2, 9), (3, 7)] {
        let mut guard = device.get_mut(block).unwrap();
        guard.fill(2);
        guard.set_lsn(lsn);
    }
    assert_eq!(device.flush().unwrap_err(), WriteError::Wal { errno: libc::EIO, block: 2 });
    assert_eq!([1, 2, 3].map(|block| on_disk(&disk, block)), [2, 1, 1]);
    log.fails.store(false, Ordering::SeqCst);
    device.sync().unwrap();
    assert_eq!([1, 2, 3].map(|block| on_disk(&disk, block)), [2, 2, 2]);
    assert_eq!(*log.flushes.lock().unwrap(), [9, 7, 9]);
}

#[test]
fn inv16_a_log_position_needs_a_log() {
    let (_cache, device, disk) = with(16, AttachOptions::new());
    let mut guard = device.get_mut(1).unwrap();
    let set = catch_unwind(AssertUnwindSafe(|| guard.set_lsn(7)));
    let message = set.unwrap_err();
    assert_eq!(message.downcast_ref(), Some(&"set_lsn needs AttachOptions::wal"));
    drop(guard);
    let mut guard = block_on(device.get_mut_async(1)).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| guard.set_lsn(7))).is_err());
    drop(guard);
    device.sync().unwrap();
    assert_eq!(on_disk(&disk, 1), 1, "unchanged");
}

/// The number of one block's log is not that of the next block in the same memory.
#[test]
fn inv16_a_buffer_forgets_the_log_of_another_block() {
    let log = |durable| log(durable, true);
    let (cache, first, _) = with(1, AttachOptions::new().wal(log(100)));
    let mut guard = first.get_mut(1).unwrap();
    guard.fill(2);
    guard.set_lsn(100);
    drop(guard);
    first.sync().unwrap();
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; SIZE * 64])));
    let options = AttachOptions::new().wal(log(0));
    let second = cache.attach_with(Arc::clone(&disk), options).unwrap();
    fill(&second, 1, 3);
    second.sync().unwrap();
    assert_eq!(on_disk(&disk, 1), 3);
}

/// What a task writes, and what it has not modified otherwise.
#[test]
fn inv16_the_blocks_of_tasks_wait_too() {
    let log = log(5, true);
    let (_cache, device, disk) = patient(SHORT, 16, AttachOptions::new().wal(log));
    let mut guard = block_on(device.get_mut_async(1)).unwrap();
    guard.set_lsn(9);
    guard.set_lsn(4); // the larger one counts
    drop(guard);
    assert_eq!(device.flush(), Err(WriteError::Wal { errno: libc::EIO, block: 1 }));
    assert_eq!(on_disk(&disk, 1), 1);
}

/// A checkpoint that took the position after its sync, or without the guards that are held, would delete
/// entries of the log that a crash needs.
#[test]
fn inv16_the_oldest_position_is_that_of_a_guard_that_is_held() {
    let log = log(100, false);
    let (_cache, device, disk) = with(16, AttachOptions::new().wal(log));
    assert_eq!(device.oldest_lsn(), None);
    let mut held = device.get_mut(1).unwrap();
    held.set_lsn(7);
    let mut other = device.get_mut(2).unwrap();
    other.set_lsn(5);
    drop(other);
    assert_eq!(device.oldest_lsn(), Some(5));
    device.write_through(2..3).unwrap();
    assert_eq!(device.oldest_lsn(), Some(7), "of the guard");
    held.set_lsn(12);
    held.set_lsn(6);
    drop(held);
    assert_eq!(device.oldest_lsn(), Some(6), "of the dirty block");
    disk.inject_next(Operation::Write, Fault::Error(libc::EIO));
    device.flush().unwrap_err();
    assert_eq!(device.oldest_lsn(), Some(6), "the write has failed");
    device.sync().unwrap();
    assert_eq!(device.oldest_lsn(), None);
    // Each change counts from the time at which the block was clean.
    for (block, lsn) in [(1, 20), (2, 30), (3, 40)] {
        device.get_mut(block).unwrap().set_lsn(lsn);
    }
    assert_eq!(device.oldest_lsn(), Some(20));
    device.invalidate(1).unwrap();
    assert_eq!(device.oldest_lsn(), Some(30), "the change of block 1 is dropped");
    device.discard(2..3).unwrap();
    assert_eq!(device.oldest_lsn(), Some(40), "so is that of block 2");
    block_on(device.get_mut_async(1)).unwrap().set_lsn(35);
    assert_eq!(device.oldest_lsn(), Some(35));
    device.close().unwrap();
}
