//! A device reports a loss to one caller only, as the kernel does for files. A concurrent caller that
//! gets no error is affected, too.

use std::thread::JoinHandle;

use crate::world::*;

/// Longer than a thread takes that waits for nothing.
const MOMENT: Duration = Duration::from_millis(100);

/// A device whose block 1 is written, not synced, and whose block 2 is dirty.
fn disk() -> (Disk, Device) {
    let (_cache, device, disk) = with(16, AttachOptions::new());
    device.get_mut(1).unwrap()[0] = 1;
    device.flush().unwrap();
    device.get_mut(2).unwrap()[0] = 2;
    (disk, device)
}

/// The operations of the kind that are held fail.
fn fail(disk: &Disk, operation: Operation) {
    disk.inject(operation, .., Fault::Error(libc::EIO));
}

type Ended = JoinHandle<Result<(), WriteError>>;

/// Makes a block durable: block 1 by a sync, block 2 by a durable write.
fn through(device: &Device, block: u64) -> Ended {
    let device = device.clone();
    thread::spawn(move || device.write_through(block..block + 1))
}

/// Both blocks are dirty again, and written by the next sync.
#[track_caller]
fn check_reset(disk: &Disk, device: &Device) {
    assert!(device.reset().unwrap().is_empty());
    check_again(disk, device);
}

#[track_caller]
fn check_again(disk: &Disk, device: &Device) {
    assert!(device.is_newer(1..2) && device.is_newer(2..3), "both are dirty");
    let before = disk.count(Operation::Write);
    let synced = device.sync();
    assert!(matches!(synced, Ok(()) | Err(WriteError::Earlier { .. })), "{synced:?}");
    assert_eq!(disk.count(Operation::Write), before + 2);
}

/// Which of the two has begun first, which one the device answers first, and which one it tells of the loss; and
/// whether a reset comes between the two answers. A call that was told of no loss may have lost its block all the same.
#[test]
fn inv18_a_sync_and_a_durable_write_wait_for_what_the_other_is_told() {
    for [is_sync_first, is_sync_answered, is_sync_told, resets] in [
        [true, false, false, false],
        [true, false, false, true],
        [false, true, false, false],
        [true, false, true, false],
        [false, true, true, false],
    ] {
        let (disk, device) = disk();
        let (writes, syncs) = (disk.hold(Operation::Write), disk.hold(Operation::Sync));
        let begin = |is_sync: bool| {
            let call = through(&device, if is_sync { 1 } else { 2 });
            if is_sync {
                syncs.wait()
            } else {
                writes.wait()
            }
            call
        };
        let mut calls = vec![begin(is_sync_first), begin(!is_sync_first)];
        let told = if is_sync_told { Operation::Sync } else { Operation::Write };
        fail(&disk, told);
        let mut holds = [(true, syncs), (false, writes)];
        holds.sort_by_key(|(is_sync, _)| *is_sync != is_sync_answered);
        let [(_, answered), (_, later)] = holds;
        drop(answered);
        if resets {
            assert_eq!(calls.pop().unwrap().join().unwrap(), POISONED);
            disk.heal();
            assert!(device.reset().unwrap().is_empty());
        } else {
            thread::sleep(MOMENT);
        }
        drop(later);
        calls.into_iter().for_each(|call| assert_eq!(call.join().unwrap(), POISONED));
        disk.heal();
        match resets {
            true => check_again(&disk, &device),
            false => check_reset(&disk, &device),
        }
    }
}

/// A write past the cache notes its blocks after the reset has asked which blocks may be lost, and a
/// sync that began before the write fails before the reset ends.
#[test]
fn inv18_a_reset_does_not_end_a_failure_that_comes_meanwhile() {
    let (disk, device) = disk();
    let (writes, syncs) = (disk.hold(Operation::Write), disk.hold(Operation::Sync));
    let (asked, written) = (device.get_mut(1).unwrap(), device.get_mut(9).unwrap());
    let around = thread::spawn({
        let device = device.clone();
        move || device.write_around(9, &[9; SIZE])
    });
    let sync = through(&device, 1);
    syncs.wait();
    let write = through(&device, 2);
    writes.wait();
    thread::sleep(MOMENT); // the write past the cache waits for the guard of block 9
    fail(&disk, Operation::Write);
    drop(writes);
    write.join().unwrap().unwrap_err();
    disk.heal();
    let reset = thread::spawn({
        let device = device.clone();
        move || device.reset()
    });
    thread::sleep(MOMENT); // the reset waits for the guard of block 1
    drop(written);
    let around = around.join().unwrap();
    fail(&disk, Operation::Sync);
    drop(syncs);
    assert_eq!(sync.join().unwrap(), POISONED);
    disk.heal();
    drop(asked);
    let lost = reset.join().unwrap().unwrap();
    let is_told = around.is_err() || lost.blocks().contains(&(9..10));
    assert!(is_told, "the sync was told of the loss of block 9: {lost:?}");
    check_again(&disk, &device);
}
