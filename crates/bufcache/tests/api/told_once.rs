//! A device reports a loss to one caller only, as the kernel does for files. A concurrent caller that
//! gets no error is affected, too.
#![cfg(not(offlock_model))]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bufcache::{AttachOptions, BlockDevice, Cache, Device, MemoryDevice, WriteError};

const SIZE: usize = 512;
/// A guess: longer than a thread takes that waits for nothing.
const MOMENT: Duration = Duration::from_millis(100);

/// Calls that report their begin, and end when the test tells them to or has ended.
struct Gate {
    begun: Mutex<mpsc::Sender<()>>,
    end: Mutex<mpsc::Receiver<Option<i32>>>,
}

/// The other side of a gate.
struct Ends {
    begun: mpsc::Receiver<()>,
    end: mpsc::Sender<Option<i32>>,
}

impl Gate {
    fn new() -> (Self, Ends) {
        let ((is_begun, begun), (end, ends)) = (mpsc::channel(), mpsc::channel());
        (Self { begun: Mutex::new(is_begun), end: Mutex::new(ends) }, Ends { begun, end })
    }

    fn pass(&self) -> io::Result<()> {
        let _ = self.begun.lock().unwrap().send(()); // fails once the test waits no more
        match self.end.lock().unwrap().recv() {
            Ok(Some(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Ok(None) | Err(_) => Ok(()),
        }
    }
}

struct Disk {
    inner: MemoryDevice,
    writes: AtomicU64,
    durable: Gate,
    sync: Gate,
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.read(offset, buf)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.inner.write(offset, buf)
    }

    fn write_durable(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write(offset, buf)?;
        self.durable.pass()
    }

    fn sync(&self) -> io::Result<()> {
        self.sync.pass()
    }
}

/// A device whose block 1 is written, not synced, and whose block 2 is dirty.
fn disk() -> (Arc<Disk>, Device, Ends, Ends) {
    let ((durable, writes), (sync, syncs)) = (Gate::new(), Gate::new());
    let inner = MemoryDevice::new(vec![0; 64 * SIZE]);
    let disk = Arc::new(Disk { inner, writes: AtomicU64::new(0), durable, sync });
    let builder = Cache::builder(16 * SIZE).block_size(SIZE);
    let builder = builder.write_back_after(Duration::from_secs(3600));
    let cache = builder.patience(Duration::from_secs(60)).build().unwrap();
    let options = AttachOptions::new().on_loss(|_| {});
    let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
    device.get_mut(1).unwrap()[0] = 1;
    device.flush().unwrap();
    device.get_mut(2).unwrap()[0] = 2;
    (disk, device, writes, syncs)
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
    let before = disk.writes.load(Ordering::Relaxed);
    let synced = device.sync();
    assert!(matches!(synced, Ok(()) | Err(WriteError::Earlier { .. })), "{synced:?}");
    assert_eq!(disk.writes.load(Ordering::Relaxed), before + 2);
}

fn poisoned() -> Result<(), WriteError> {
    Err(WriteError::Poisoned { errno: libc::EIO })
}

#[test]
fn inv18_a_sync_during_which_a_durable_write_fails_fails() {
    for reset_between in [false, true] {
        let (disk, device, writes, syncs) = disk();
        let sync = through(&device, 1);
        syncs.begun.recv().unwrap();
        let write = through(&device, 2);
        writes.begun.recv().unwrap();
        writes.end.send(Some(libc::EIO)).unwrap();
        write.join().unwrap().unwrap_err();
        if reset_between {
            assert!(device.reset().unwrap().is_empty());
        }
        syncs.end.send(None).unwrap();
        assert_eq!(sync.join().unwrap(), poisoned(), "the write was told of what the sync lost");
        drop((writes, syncs));
        match reset_between {
            true => check_again(&disk, &device),
            false => check_reset(&disk, &device),
        }
    }
}

/// It may have been told of the loss already, and not have said so.
#[test]
fn inv18_a_sync_waits_for_what_a_durable_write_is_told() {
    let (disk, device, writes, syncs) = disk();
    let write = through(&device, 2);
    writes.begun.recv().unwrap();
    let sync = through(&device, 1);
    syncs.begun.recv().unwrap();
    syncs.end.send(None).unwrap();
    thread::sleep(MOMENT);
    writes.end.send(Some(libc::EIO)).unwrap();
    write.join().unwrap().unwrap_err();
    assert_eq!(sync.join().unwrap(), poisoned());
    drop((writes, syncs));
    check_reset(&disk, &device);
}

#[test]
fn inv18_a_durable_write_waits_for_what_a_sync_is_told() {
    let (disk, device, writes, syncs) = disk();
    let sync = through(&device, 1);
    syncs.begun.recv().unwrap();
    let write = through(&device, 2);
    writes.begun.recv().unwrap();
    writes.end.send(None).unwrap();
    thread::sleep(MOMENT);
    syncs.end.send(Some(libc::EIO)).unwrap();
    assert_eq!(sync.join().unwrap(), poisoned());
    assert_eq!(write.join().unwrap(), poisoned(), "the sync was told of what the write lost");
    drop((writes, syncs));
    check_reset(&disk, &device);
}

#[test]
fn inv18_a_durable_write_that_ends_behind_a_failed_sync_is_dirty_after_a_reset() {
    let (disk, device, writes, syncs) = disk();
    let write = through(&device, 2);
    writes.begun.recv().unwrap();
    let sync = through(&device, 1);
    syncs.begun.recv().unwrap();
    syncs.end.send(Some(libc::EIO)).unwrap();
    assert_eq!(sync.join().unwrap(), poisoned());
    writes.end.send(None).unwrap();
    assert_eq!(write.join().unwrap(), poisoned());
    drop((writes, syncs));
    check_reset(&disk, &device);
}

/// A write past the cache notes its blocks after the reset has asked which blocks may be lost, and a
/// sync that began before the write fails before the reset ends.
#[test]
fn inv18_a_reset_does_not_end_a_failure_that_comes_meanwhile() {
    let (disk, device, writes, syncs) = disk();
    let (asked, written) = (device.get_mut(1).unwrap(), device.get_mut(9).unwrap());
    let around = thread::spawn({
        let device = device.clone();
        move || device.write_around(9, &[9; SIZE])
    });
    let sync = through(&device, 1);
    syncs.begun.recv().unwrap();
    let write = through(&device, 2);
    writes.begun.recv().unwrap();
    thread::sleep(MOMENT); // the write past the cache waits for the guard of block 9
    writes.end.send(Some(libc::EIO)).unwrap();
    write.join().unwrap().unwrap_err();
    let reset = thread::spawn({
        let device = device.clone();
        move || device.reset()
    });
    thread::sleep(MOMENT); // the reset waits for the guard of block 1
    drop(written);
    let around = around.join().unwrap();
    syncs.end.send(Some(libc::EIO)).unwrap();
    assert_eq!(sync.join().unwrap(), poisoned());
    drop(asked);
    let lost = reset.join().unwrap().unwrap();
    let is_told = around.is_err() || lost.blocks().contains(&(9..10));
    assert!(is_told, "the sync was told of the loss of block 9: {lost:?}");
    drop((writes, syncs));
    check_again(&disk, &device);
}

/// Calls that fail without an error of their own do not wait for each other for ever.
#[test]
fn durable_writes_and_syncs_at_once_end() {
    let (_, device, writes, syncs) = disk();
    drop((writes, syncs));
    thread::scope(|scope| {
        for first in [10, 20, 30] {
            let device = &device;
            scope.spawn(move || {
                for round in 0..200 {
                    let block = first + round % 4;
                    device.get_mut(block).unwrap()[0] = round as u8;
                    if round % 3 == 0 {
                        device.sync().unwrap();
                    }
                    device.write_through(block..block + 1).unwrap();
                }
            });
        }
    });
    device.close().unwrap();
}
