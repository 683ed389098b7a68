//! What the tests have in common: their imports, a cache of a few blocks over a device that fails when it is told to, and
//! one over a device that keeps what it begins.

pub(crate) use aio_reap::Engine;
pub(crate) use bufcache::{
    AttachOptions, BlockDevice, BuildError, Cache, Device, Eviction, FileDevice, GetError,
    IntoDevice, Load, MemoryDevice, Wal, WriteError, lend_engine,
};
pub(crate) use bufcache_test::{Fault, FaultDevice, Operation};
pub(crate) use std::fs::File;
pub(crate) use std::future::Future;
pub(crate) use std::pin::pin;
pub(crate) use std::rc::Rc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64};
pub(crate) use std::sync::{Arc, Barrier, Mutex, mpsc};
pub(crate) use std::task::{Context, Poll, Wake, Waker};
pub(crate) use std::time::{Duration, Instant};
pub(crate) use std::{io, thread};
pub(crate) use testkit::wait::wait_for;
pub(crate) use testkit::{WakeCount, block_on, in_time};

pub(crate) use crate::kept::{Begun, KeptDevice};

use std::os::unix::fs::FileExt;

pub(crate) const SIZE: usize = 512;

/// Of a device of which a sync has failed.
pub(crate) const POISONED: Result<(), WriteError> = Err(WriteError::Poisoned { errno: libc::EIO });

pub(crate) type Disk = Arc<FaultDevice<MemoryDevice>>;

/// Much longer than anything takes that is waited for.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A cache of so many blocks, whose cleaner does nothing by itself, and a device of 64.
pub(crate) fn with(blocks: usize, options: AttachOptions) -> (Cache, Device, Disk) {
    patient(LONG, blocks, options)
}

/// [`with`] a patience.
pub(crate) fn patient(
    time: Duration,
    blocks: usize,
    options: AttachOptions,
) -> (Cache, Device, Disk) {
    let builder = Cache::builder(blocks * SIZE).block_size(SIZE);
    let builder = builder.write_back_after(Duration::from_secs(3600)).dirty_limits(100, 100);
    let cache = builder.patience(time).build().unwrap();
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; SIZE * 64])));
    let device = cache.attach_with(Arc::clone(&disk), options.on_loss(|_| {})).unwrap();
    (cache, device, disk)
}

pub(crate) fn new() -> (Cache, Device, Disk) {
    with(16, AttachOptions::new())
}

pub(crate) fn fill(device: &Device, block: u64, with: u8) {
    device.get_mut(block).unwrap().fill(with);
}

/// What the device itself has.
pub(crate) fn on_disk(disk: &Disk, block: u64) -> u8 {
    let mut bytes = [0; SIZE];
    disk.inner().read(block * SIZE as u64, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

/// A cache of so much patience, whose cleaner does nothing by itself, and a device that keeps what it begins.
pub(crate) fn kept(patience: Duration) -> (Cache, Device, Arc<KeptDevice>) {
    let builder = Cache::builder(16 * SIZE).block_size(SIZE).patience(patience);
    let builder = builder.write_back_after(Duration::from_secs(3600)).dirty_limits(100, 100);
    let (cache, kept) = (builder.build().unwrap(), Arc::new(KeptDevice::new(64 * SIZE)));
    let options = AttachOptions::new().on_loss(|_| {});
    let device = cache.attach_with(Arc::clone(&kept), options).unwrap();
    (cache, device, kept)
}

/// Releases a device in its drop: the drop of a handle waits for the device.
pub(crate) struct Releases<'d>(pub(crate) &'d KeptDevice);

impl Drop for Releases<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// A file of 64 blocks of 4,096 bytes, each filled with its number.
pub(crate) fn numbered_file() -> File {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for block in 0..64 {
        file.write_all_at(&[block as u8; 4096], block * 4096).unwrap();
    }
    file
}
