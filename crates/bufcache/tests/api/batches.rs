//! Devices that do the writes of a batch in an order of their own: each write has its own result.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bufcache::{BlockDevice, Cache, DeviceWrite, MemoryDevice, WriteError};

const SIZE: usize = 4096;

/// Refuses block 1, and does batches as it is told to.
struct Disk {
    inner: MemoryDevice,
    batch: fn(&Self, &mut [DeviceWrite<'_>]),
}

impl Disk {
    fn write_one(&self, write: &mut DeviceWrite<'_>) {
        write.end(self.write_vectored(write.offset(), write.parts()));
    }
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.read(offset, buf)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if offset == SIZE as u64 {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.inner.write(offset, buf)
    }

    fn write_batch(&self, writes: &mut [DeviceWrite<'_>], _durable: bool) {
        (self.batch)(self, writes);
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

fn in_reverse(disk: &Disk, writes: &mut [DeviceWrite<'_>]) {
    writes.reverse();
    writes.iter_mut().for_each(|write| disk.write_one(write));
}

fn sorted_after_they_ended(disk: &Disk, writes: &mut [DeviceWrite<'_>]) {
    writes.iter_mut().for_each(|write| disk.write_one(write));
    writes.sort_by_key(|write| std::cmp::Reverse(write.offset()));
}

fn exchanged(disk: &Disk, writes: &mut [DeviceWrite<'_>]) {
    if let [first, .., last] = writes {
        disk.write_one(first);
        std::mem::swap(first, last);
        disk.write_one(first);
    }
}

fn in_two_attempts(disk: &Disk, writes: &mut [DeviceWrite<'_>]) {
    for write in writes {
        write.end(Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        disk.write_one(write);
    }
}

fn without_the_first(disk: &Disk, writes: &mut [DeviceWrite<'_>]) {
    writes.iter_mut().filter(|write| write.offset() != SIZE as u64).for_each(|write| {
        disk.write_one(write);
    });
    writes.reverse();
}

#[test]
fn inv17_the_result_of_a_write_is_that_of_its_block_in_whatever_order_a_batch_is_left() {
    let batches = [in_reverse, sorted_after_they_ended, exchanged, in_two_attempts];
    for (number, batch) in batches.into_iter().chain([without_the_first as _]).enumerate() {
        let disk = Arc::new(Disk { inner: MemoryDevice::new(vec![1; SIZE * 16]), batch });
        let builder = Cache::builder(16 * SIZE).write_back_after(Duration::from_secs(3600));
        let cache = builder.dirty_limits(100, 100).build().unwrap();
        let options = bufcache::AttachOptions::new(SIZE).on_loss(|_| {});
        let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
        // No neighbours: two writes.
        for block in [1, 3] {
            device.get_mut(block).unwrap().fill(2);
        }
        let error = WriteError::Io { errno: libc::EIO, block: 1 };
        assert_eq!(device.flush(), Err(error), "batch {number}");
        assert!(device.is_newer(1..2), "block 1 is dirty, batch {number}");
        assert!(!device.is_newer(3..4), "block 3 is written, batch {number}");
        let mut bytes = [0; SIZE];
        disk.inner.read(3 * SIZE as u64, &mut bytes).unwrap();
        assert_eq!(bytes[0], 2, "batch {number}");
    }
}
