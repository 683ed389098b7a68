//! The end of a device: how long writers are accepted, and the state after a close that fails.

use crate::world::*;

#[test]
fn inv19_close_is_durable_or_leaves_the_device_open() {
    let (_cache, device, disk) = new();
    disk.record().unwrap();
    fill(&device, 1, 2);
    let other = device.clone();
    disk.inject_next(Operation::Write, Fault::Error(libc::EIO));
    assert_eq!(device.close(), Err(WriteError::Io { errno: libc::EIO, block: 1 }));
    device.close().unwrap();
    assert_eq!(other.get_mut(1).unwrap_err(), GetError::Closed);
    assert_eq!(other.try_get_mut(1).unwrap_err(), GetError::Closed);
    assert_eq!(other.create(40).unwrap_err(), GetError::Closed);
    assert_eq!(other.discard(1..2).unwrap_err(), WriteError::Closed);
    assert_eq!(other.zero(1..2).unwrap_err(), WriteError::Closed);
    assert_eq!(other.sync().unwrap_err(), WriteError::Closed);
    assert_eq!(other.get(40).unwrap_err(), GetError::Closed);
    assert_eq!(other.get(40).unwrap_err(), GetError::Closed);
    assert_eq!(other.close().unwrap_err(), WriteError::Closed);
    let after = disk.after_power_cut(disk.moments(), |_, _| 0).unwrap();
    assert_eq!(after[SIZE], 2);
}

/// What comes while the device syncs is refused: it would not be durable when the close returns.
#[test]
fn inv19_a_close_refuses_writers_before_it_syncs() {
    for fails in [false, true] {
        let (_cache, device, disk) = new();
        fill(&device, 1, 2);
        drop(device.get(2).unwrap());
        let other = device.clone();
        if fails {
            disk.inject_next(Operation::Sync, Fault::Error(libc::EIO));
        }
        let held = disk.hold(Operation::Sync);
        let closing = thread::spawn(move || (device.close(), device));
        held.wait();
        assert_eq!(other.get_mut(1).unwrap_err(), GetError::Closed);
        assert_eq!(other.try_get_mut(2).unwrap_err(), GetError::Closed);
        assert_eq!(other.create(3).unwrap_err(), GetError::Closed);
        assert_eq!(other.discard(1..2).unwrap_err(), WriteError::Closed);
        assert_eq!(other.get(4).unwrap()[0], 1, "it can be read");
        drop(held);
        let (closed, device) = closing.join().unwrap();
        assert_eq!(closed.is_err(), fails);
        let Err(error) = closed else { continue };
        // Poisoned, and otherwise as it was.
        assert_eq!(error, WriteError::Poisoned { errno: libc::EIO });
        assert_eq!(other.get_mut(1).unwrap_err(), GetError::Poisoned { errno: libc::EIO });
        assert!(device.reset().unwrap().is_empty());
        fill(&other, 1, 3);
        device.close().unwrap();
        assert_eq!(on_disk(&disk, 1), 3);
    }
}

#[test]
fn inv19_of_two_that_close_one_has_closed_it() {
    let (_cache, device, disk) = new();
    fill(&device, 1, 2);
    let (other, kept) = (device.clone(), device.clone());
    let syncs = disk.hold(Operation::Sync);
    let ends = thread::scope(|scope| {
        let both = [device, other].map(|device| scope.spawn(move || device.close()));
        syncs.wait();
        thread::sleep(Duration::from_millis(50)); // the other waits for its turn
        drop(syncs);
        both.map(|one| one.join().unwrap())
    });
    assert!(ends.contains(&Ok(())) && ends.contains(&Err(WriteError::Closed)), "{ends:?}");
    assert_eq!(kept.get_mut(1).unwrap_err(), GetError::Closed);
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
