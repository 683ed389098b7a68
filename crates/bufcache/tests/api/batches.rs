//! Devices that end the operations which they have begun in an order of their own, or not at all: each operation
//! has its own result.

use bufcache::DeviceWrite;

use crate::world::*;

const SIZE: usize = 4096;

/// Refuses block 1. It keeps what it begins, which another thread ends.
struct Disk {
    inner: MemoryDevice,
    kept: Mutex<Vec<DeviceWrite>>,
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

    fn begin_write(&self, write: DeviceWrite) {
        assert!(!write.is_durable());
        self.kept.lock().unwrap().push(write);
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Disk {
    fn end(&self, write: DeviceWrite) {
        let result = self.write_vectored(write.offset(), write.parts());
        write.finish(result);
    }
}

fn by_the_device(disk: &Disk, writes: Vec<DeviceWrite>) {
    writes.into_iter().for_each(|write| disk.end(write));
}

fn in_reverse(disk: &Disk, writes: Vec<DeviceWrite>) {
    writes.into_iter().rev().for_each(|write| disk.end(write));
}

fn by_the_blocking_method(_: &Disk, writes: Vec<DeviceWrite>) {
    writes.into_iter().rev().for_each(DeviceWrite::defer);
}

fn late(disk: &Disk, writes: Vec<DeviceWrite>) {
    for write in writes {
        thread::sleep(Duration::from_millis(20));
        disk.end(write);
    }
}

/// Attaches a device whose dirty blocks only a flush writes.
fn attach(disk: impl BlockDevice) -> (Cache, Device) {
    let builder = Cache::builder(16 * SIZE).write_back_after(Duration::from_secs(3600));
    let cache = builder.dirty_limits(100, 100).build().unwrap();
    let device = cache.attach_with(disk, AttachOptions::new().on_loss(|_| {})).unwrap();
    (cache, device)
}

#[test]
fn inv17_the_result_of_a_write_is_that_of_its_block_in_whatever_order_writes_end() {
    let ends: [fn(&Disk, Vec<DeviceWrite>); 4] =
        [by_the_device, in_reverse, by_the_blocking_method, late];
    for (number, end) in ends.into_iter().enumerate() {
        let inner = MemoryDevice::new(vec![1; SIZE * 16]);
        let disk = Arc::new(Disk { inner, kept: Mutex::default() });
        let (_cache, device) = attach(Arc::clone(&disk));
        // No neighbours: two writes.
        for block in [1, 3] {
            device.get_mut(block).unwrap().fill(2);
        }
        let flushed = thread::scope(|scope| {
            let flushes = scope.spawn(|| device.flush());
            // A run that fails is one block, which is not tried by itself.
            wait_for("both writes", || disk.kept.lock().unwrap().len() == 2);
            let writes = std::mem::take(&mut *disk.kept.lock().unwrap());
            end(&disk, writes);
            flushes.join().unwrap()
        });
        let error = WriteError::Io { errno: libc::EIO, block: 1 };
        assert_eq!(flushed, Err(error), "{number}");
        assert!(device.is_newer(1..2), "block 1 is dirty, {number}");
        assert!(!device.is_newer(3..4), "block 3 is written, {number}");
        let mut bytes = [0; SIZE];
        disk.inner.read(3 * SIZE as u64, &mut bytes).unwrap();
        assert_eq!(bytes[0], 2, "{number}");
        // The drop of the handle writes once more.
        let ends = thread::spawn(move || drop(device));
        wait_for("the last write", || !disk.kept.lock().unwrap().is_empty());
        disk.kept.lock().unwrap().clear();
        ends.join().unwrap();
    }
}
