//! Who waits for a sync that fails is not told that all is well by the next.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bufcache::{Cache, Fault, FaultDevice, MemoryDevice, Operation, WriteError};

#[test]
fn inv18_a_sync_behind_one_that_fails_fails() {
    let device = Arc::new(FaultDevice::new(MemoryDevice::new(vec![0; 1 << 20])));
    let cache = Cache::new(1 << 20).unwrap();
    let disk = cache.attach(Arc::clone(&device), 4096).unwrap();
    disk.get_mut(1).unwrap()[0] = 9;
    device.inject(Operation::Sync, 0..1, Fault::Delay(Duration::from_millis(300)));
    device.inject(Operation::Sync, 0..1, Fault::Error(libc::EIO));
    let first = thread::spawn({
        let disk = disk.clone();
        move || disk.sync()
    });
    while device.count(Operation::Sync) == 0 {
        thread::yield_now();
    }
    let second = disk.sync();
    assert_eq!(first.join().unwrap(), Err(WriteError::Poisoned { errno: libc::EIO }));
    assert!(second.is_err(), "the device has given the block up");
    assert!(disk.reset().unwrap().is_empty());
    assert_eq!(disk.sync(), Ok(()));
    assert_eq!(device.count(Operation::Write), 2, "and is given it again");
}
