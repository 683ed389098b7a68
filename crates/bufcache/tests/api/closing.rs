//! The end of a device: how long writers are accepted, and the state after a close that fails.
#![cfg(not(offlock_model))]

use crate::disk;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use bufcache::{AttachOptions, BlockDevice, Cache, GetError, MemoryDevice, WriteError};
use bufcache_test::{Fault, FaultDevice, Operation};

use disk::{SIZE, fill, new, on_disk, patient};
use testkit::wait::wait_for;

/// The patience of a call that is to be refused.
const SHORT: Duration = Duration::from_millis(300);

#[test]
fn inv19_close_is_durable_or_gives_the_handle_back() {
    let (_cache, device, disk) = new();
    disk.record().unwrap();
    fill(&device, 1, 2);
    let other = device.clone();
    disk.inject_next(Operation::Write, Fault::Error(libc::EIO));
    let error = device.close().unwrap_err();
    assert_eq!(error.error, WriteError::Io { errno: libc::EIO, block: 1 });
    error.device.close().unwrap();
    assert_eq!(other.get_mut(1).unwrap_err(), GetError::Closed);
    assert_eq!(other.try_get_mut(1).unwrap_err(), GetError::Closed);
    assert_eq!(other.create(40).unwrap_err(), GetError::Closed);
    assert_eq!(other.discard(1..2).unwrap_err(), WriteError::Closed);
    assert_eq!(other.zero(1..2).unwrap_err(), WriteError::Closed);
    assert_eq!(other.sync().unwrap_err(), WriteError::Closed);
    assert_eq!(other.get(40).unwrap_err(), GetError::Closed);
    assert_eq!(other.get(40).unwrap_err(), GetError::Closed);
    assert_eq!(other.close().unwrap_err().error, WriteError::Closed);
    let after = disk.after_power_cut(disk.moments(), |_, _| 0).unwrap();
    assert_eq!(after[SIZE], 2);
}

/// A device whose syncs wait until they are let go on.
struct Gate {
    inner: MemoryDevice,
    begun: Mutex<mpsc::Sender<()>>,
    go_on: Mutex<mpsc::Receiver<()>>,
    fails: AtomicBool,
}

impl BlockDevice for Gate {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.read(offset, buf)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.inner.write(offset, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.begun.lock().unwrap().send(()).unwrap();
        let _ = self.go_on.lock().unwrap().recv(); // fails once the test has ended
        if self.fails.swap(false, Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }
}

/// What comes while the device syncs is refused: it would not be durable when the close returns.
#[test]
fn inv19_a_close_refuses_writers_before_it_syncs() {
    for fails in [false, true] {
        let ((begun, is_begun), (go_on, may_go_on)) = (mpsc::channel(), mpsc::channel());
        let inner = MemoryDevice::new(vec![1; SIZE * 64]);
        let (begun, may_go_on) = (Mutex::new(begun), Mutex::new(may_go_on));
        let fails_once = AtomicBool::new(fails);
        let gate = Arc::new(Gate { inner, begun, go_on: may_go_on, fails: fails_once });
        let cache = Cache::builder(16 * SIZE).block_size(SIZE).build().unwrap();
        let options = AttachOptions::new().on_loss(|_| {});
        let device = cache.attach_with(Arc::clone(&gate), options).unwrap();
        fill(&device, 1, 2);
        drop(device.get(2).unwrap());
        let other = device.clone();
        let closing = thread::spawn(move || device.close());
        is_begun.recv().unwrap();
        assert_eq!(other.get_mut(1).unwrap_err(), GetError::Closed);
        assert_eq!(other.try_get_mut(2).unwrap_err(), GetError::Closed);
        assert_eq!(other.create(3).unwrap_err(), GetError::Closed);
        assert_eq!(other.discard(1..2).unwrap_err(), WriteError::Closed);
        assert_eq!(other.get(4).unwrap()[0], 1, "it can be read");
        go_on.send(()).unwrap();
        let closed = closing.join().unwrap();
        drop(go_on);
        assert_eq!(closed.is_err(), fails);
        let Err(error) = closed else { continue };
        // Poisoned, and otherwise as it was.
        assert_eq!(error.error, WriteError::Poisoned { errno: libc::EIO });
        assert_eq!(other.get_mut(1).unwrap_err(), GetError::Poisoned { errno: libc::EIO });
        assert!(error.device.reset().unwrap().is_empty());
        fill(&other, 1, 3);
        error.device.close().unwrap();
        let mut bytes = [0; SIZE];
        gate.inner.read(SIZE as u64, &mut bytes).unwrap();
        assert_eq!(bytes[0], 3);
    }
}

/// Writers are admitted again, and what was dirty is.
#[test]
fn inv19_a_close_that_fails_leaves_the_device_as_it_was() {
    let (cache, device, disk) = new();
    fill(&device, 1, 2);
    fill(&device, 2, 3);
    disk.inject_next(Operation::Write, Fault::Error(libc::ENOSPC));
    disk.inject(Operation::Write, 1.., Fault::Error(libc::EIO)); // and block by block
    let error = device.close().unwrap_err();
    assert!(matches!(error.error, WriteError::Io { errno: libc::EIO, block: 1 }));
    let device = error.device;
    assert_eq!(cache.stats().dirty, 2 * SIZE);
    assert_eq!((device.get(1).unwrap()[0], device.get(2).unwrap()[0]), (2, 3));
    fill(&device, 2, 4);
    fill(&device, 3, 5);
    disk.heal();
    device.close().unwrap();
    assert_eq!([1, 2, 3].map(|block| on_disk(&disk, block)), [2, 4, 5]);
    assert_eq!(cache.stats().dirty, 0);
}

/// A guard that is there is waited for, for as long as the cache waits.
#[test]
fn inv19_a_close_waits_for_guards_to_write() {
    let (_cache, device, disk) = patient(SHORT, 16, AttachOptions::new());
    for create in [false, true] {
        // Not dirty yet: no list has it.
        let other = device.clone();
        let mut guard = if create { other.create(5) } else { other.get_mut(1) }.unwrap();
        let error = device.clone().close().unwrap_err();
        let block = if create { 5 } else { 1 };
        assert_eq!(error.error, WriteError::WouldDeadlock { block: Some(block) });
        let again = device.clone();
        let closed = thread::spawn(move || again.close()).join().unwrap();
        assert_eq!(closed.unwrap_err().error, WriteError::Busy { block });
        guard.fill(2);
        drop(guard);
        drop(other.get_mut(7).unwrap()); // it is open
    }
    device.close().unwrap();
    assert_eq!([1, 5].map(|block| on_disk(&disk, block)), [2, 2]);
}

#[test]
fn inv19_what_is_written_while_it_is_being_closed_is_durable() {
    let (_cache, device, disk) = new();
    disk.record().unwrap();
    let other = device.clone();
    thread::scope(|scope| {
        let (have, had) = mpsc::channel();
        let other = &other;
        scope.spawn(move || {
            let mut guard = other.get_mut(1).unwrap();
            have.send(()).unwrap();
            thread::sleep(Duration::from_millis(50)); // the close begins, or finds it dirty
            guard.fill(2);
        });
        had.recv().unwrap();
        let mut closed = device.close();
        while let Err(error) = closed {
            assert_eq!(error.error, WriteError::Busy { block: 1 }, "on a busy machine");
            closed = error.device.close();
        }
        let after = disk.after_power_cut(disk.moments(), |_, _| 0).unwrap();
        assert_eq!(after[SIZE], 2);
    });
}

#[test]
fn inv19_of_two_that_close_one_has_closed_it() {
    let (_cache, device, _disk) = new();
    fill(&device, 1, 2);
    let other = device.clone();
    let ends = thread::scope(|scope| {
        let both = [device, other].map(|device| scope.spawn(move || device.close()));
        both.map(|one| one.join().unwrap().map_err(|error| error.error))
    });
    assert!(ends.contains(&Ok(())) && ends.contains(&Err(WriteError::Closed)), "{ends:?}");
}

#[test]
fn inv19_the_last_handle_makes_it_durable_or_tells_the_loss() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let tell = {
        let told = Arc::clone(&told);
        move |error| told.lock().unwrap().push(error)
    };
    let cache = Cache::builder(16 * SIZE).block_size(SIZE).build().unwrap();
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; SIZE * 64])));
    let options = || AttachOptions::new().on_loss(tell.clone());
    let device = cache.attach_with(Arc::clone(&disk), options()).unwrap();
    fill(&device, 1, 2);
    drop(device);
    assert_eq!((on_disk(&disk, 1), disk.count(Operation::Sync)), (2, 1));
    assert!(told.lock().unwrap().is_empty());
    let device = cache.attach_with(Arc::clone(&disk), options()).unwrap();
    fill(&device, 2, 3);
    disk.inject(Operation::Write, .., Fault::Error(libc::EIO));
    drop(device);
    assert_eq!(*told.lock().unwrap(), [WriteError::Io { errno: libc::EIO, block: 2 }]);
    assert_eq!(cache.stats().dirty, 0);
    wait_for("the cleaner's round lets go of the device", || Arc::strong_count(&disk) == 1);
}
