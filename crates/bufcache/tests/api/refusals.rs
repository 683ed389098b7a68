//! Devices that cannot be written, or that become smaller.

use std::fs::File;
use std::io;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bufcache::{
    AttachOptions, BlockDevice, Cache, Device, EngineDevice, FileDevice, GetError, MemoryDevice,
    WriteError,
};
use bufcache_test::{Fault, FaultDevice, Operation};

const SIZE: usize = 4096;

type Attach<'a> = dyn Fn(&Cache) -> bufcache::Device + 'a;

#[test]
fn a_read_only_file_refuses_writers_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    std::fs::write(&path, [7; 4 * SIZE]).unwrap();
    let file = || FileDevice::new(File::open(&path).unwrap()).unwrap();
    let kinds: [Box<Attach<'_>>; 4] = [
        Box::new(|cache| cache.attach(file()).unwrap()),
        Box::new(|cache| cache.attach(Arc::new(file())).unwrap()),
        Box::new(|cache| cache.attach(FaultDevice::new(file())).unwrap()),
        Box::new(|cache| {
            cache.attach(EngineDevice::new(File::open(&path).unwrap()).unwrap()).unwrap()
        }),
    ];
    for attach in kinds {
        let cache = Cache::new(1 << 20).unwrap();
        let device = attach(&cache);
        assert_eq!(device.get(1).unwrap()[0], 7);
        assert_eq!(device.get_mut(1).err(), Some(GetError::ReadOnly));
        assert_eq!(device.try_get_mut(1).err(), Some(GetError::ReadOnly));
        assert_eq!(device.create(2).err(), Some(GetError::ReadOnly));
        assert_eq!(device.try_create(2).err(), Some(GetError::ReadOnly));
        assert_eq!(device.discard(0..1), Err(WriteError::ReadOnly));
        assert_eq!(device.zero(0..1), Err(WriteError::ReadOnly));
        assert_eq!(device.write_around(0, &[1; SIZE]), Err(WriteError::ReadOnly));
        assert_eq!(WriteError::ReadOnly.errno(), libc::EROFS);
        device.sync().unwrap();
    }
}

/// A device that has only what a read-only one needs.
struct Constant;

impl BlockDevice for Constant {
    fn len(&self) -> u64 {
        4 * SIZE as u64
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill(7);
        Ok(buf.len())
    }

    fn is_read_only(&self) -> bool {
        true
    }
}

#[test]
fn a_read_only_device_needs_no_sync() {
    let cache = Cache::new(1 << 20).unwrap();
    let device = cache.attach(Constant).unwrap();
    assert_eq!(device.get(1).unwrap()[0], 7);
    device.sync().unwrap();
    device.close().unwrap();
}

/// `io::Error::last_os_error()` has errno 0 behind a library that has set none.
#[test]
fn inv17_an_errno_below_one_is_a_failure() {
    for errno in [0, -1, -22, i32::MIN] {
        let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; 8 * SIZE])));
        let cache = Cache::new(1 << 20).unwrap();
        let options = AttachOptions::new().on_loss(|_| {});
        let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
        for operation in [Operation::Read, Operation::Write, Operation::Discard] {
            disk.inject(operation, .., Fault::Error(errno));
        }
        assert_eq!(device.get(5).err(), Some(GetError::Io { errno: libc::EIO, block: 5 }));
        device.create(3).unwrap().fill(2);
        let io = |block| Err(WriteError::Io { errno: libc::EIO, block });
        assert_eq!((device.flush(), cache.stats().dirty), (io(3), SIZE), "errno {errno}");
        assert_eq!(device.write_around(6, &[9; SIZE]), io(6));
        assert_eq!(device.discard(7..8), io(7));
        let bypass = device.try_bypass(5..6).unwrap().unwrap();
        assert_eq!(bypass.finish(Err(io::Error::from_raw_os_error(errno))), io(5));
        disk.heal();
        disk.inject_next(Operation::Sync, Fault::Error(errno));
        assert_eq!(device.sync(), Err(WriteError::Poisoned { errno: libc::EIO }));
    }
}

/// A device on another one, whose errors it passes on.
struct Stacked(Device);

impl BlockDevice for Stacked {
    fn len(&self) -> u64 {
        self.0.blocks() * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.copy_from_slice(&self.0.get(offset / SIZE as u64)?);
        Ok(buf.len())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        Ok(self.0.write_around(offset / SIZE as u64, buf)?)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let size = SIZE as u64;
        Ok(self.0.zero_by_device(offset / size..(offset + len) / size)?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(self.0.sync()?)
    }
}

#[test]
fn a_device_on_another_one_passes_its_errno_on() {
    let cache = Cache::new(1 << 20).unwrap();
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; 8 * SIZE])));
    let lower = cache.attach(Arc::clone(&disk)).unwrap();
    let device = cache.attach(Stacked(lower.clone())).unwrap();
    disk.inject_next(Operation::Read, Fault::Error(libc::ENODATA));
    assert_eq!(device.get(5).err(), Some(GetError::Io { errno: libc::ENODATA, block: 5 }));
    disk.inject_next(Operation::Write, Fault::Error(libc::ENOSPC));
    let full = WriteError::Io { errno: libc::ENOSPC, block: 6 };
    assert_eq!(device.write_around(6, &[9; SIZE]), Err(full));
    disk.inject(Operation::Zero, .., Fault::Error(libc::EOPNOTSUPP));
    device.zero(3..4).unwrap(); // by the cache, as the lower one cannot
    assert_eq!(device.get(3).unwrap()[0], 0);
    disk.inject_next(Operation::Sync, Fault::Error(libc::EDQUOT));
    assert_eq!(device.sync(), Err(WriteError::Poisoned { errno: libc::EDQUOT }));
    assert_eq!(lower.sync(), Err(WriteError::Poisoned { errno: libc::EDQUOT }));
    let lost = [&lower, &device].map(|device| device.reset().unwrap());
    let lost = lost.each_ref().map(|lost| lost.blocks());
    let one = slice::from_ref(&(6..7));
    assert_eq!(lost, [&[3..4, 6..7][..], one], "what was written past the cache");
    device.sync().unwrap();
}

/// A device whose length changes.
struct Shrinking {
    inner: MemoryDevice,
    len: AtomicU64,
}

impl BlockDevice for Shrinking {
    fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.len().saturating_sub(offset).min(buf.len() as u64) as usize;
        self.inner.read(offset, &mut buf[..left])
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        match buf.len() as u64 <= self.len().saturating_sub(offset) {
            true => self.inner.write(offset, buf),
            false => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match len <= self.len().saturating_sub(offset) {
            true => self.inner.discard(offset, len),
            false => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn inv17_a_device_that_became_smaller_refuses_what_it_has_no_room_for() {
    let inner = MemoryDevice::new(vec![1; 4 * SIZE]);
    let disk = Arc::new(Shrinking { inner, len: AtomicU64::new(4 * SIZE as u64) });
    let cache = Cache::new(1 << 20).unwrap();
    let options = AttachOptions::new().on_loss(|_| {});
    let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
    device.get_mut(3).unwrap().fill(2);
    disk.len.store(2 * SIZE as u64, Ordering::Relaxed);
    let error = WriteError::Io { errno: libc::ENOSPC, block: 3 };
    assert_eq!(device.sync(), Err(error));
    assert!(device.is_newer(3..4), "it is dirty still");
    for block in [2, 3] {
        let error = WriteError::Io { errno: libc::ENOSPC, block };
        assert_eq!(device.discard(block..block + 1), Err(error));
    }
    assert_eq!(device.get(2).err(), Some(GetError::ShortRead { block: 2 }));
    disk.len.store(4 * SIZE as u64, Ordering::Relaxed);
    device.sync().unwrap();
    let mut bytes = [0; SIZE];
    disk.inner.read(3 * SIZE as u64, &mut bytes).unwrap();
    assert_eq!(bytes[0], 2);
}
