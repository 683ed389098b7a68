//! When a device may be attached again: once nothing of it is in flight.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use bufcache::{
    AttachOptions, BlockDevice, BuildError, Cache, Device, DeviceRange, MemoryDevice, WriteError,
};
use testkit::wait::wait_for;

const SIZE: usize = 512;
const BUFFERS: usize = 64;
/// The cache's patience.
const SHORT: Duration = Duration::from_millis(300);

/// While it is hung, the writes of the cleaner wait and those of other threads fail.
struct Disk {
    inner: MemoryDevice,
    hung: AtomicBool,
    fails: AtomicBool,
    waiting: AtomicU32,
    /// The discards that it has begun.
    discards: Mutex<Vec<DeviceRange>>,
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some((1, 2))
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.read(offset, buf)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if self.hung.load(Ordering::SeqCst) {
            if thread::current().name() != Some("bufcache") {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            self.waiting.fetch_add(1, Ordering::SeqCst);
            while self.hung.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
        }
        match self.fails.load(Ordering::SeqCst) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => self.inner.write(offset, buf),
        }
    }

    fn begin_discard(&self, range: DeviceRange) {
        self.discards.lock().unwrap().push(range);
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A cache whose cleaner writes in its first round, when all blocks of a test are dirty, and a device that hangs.
fn new() -> (Cache, Arc<Disk>) {
    new_with(Duration::ZERO)
}

fn new_with(write_back_after: Duration) -> (Cache, Arc<Disk>) {
    let builder = Cache::builder(BUFFERS * SIZE).block_size(SIZE);
    let builder = builder.dirty_limits(100, 100).write_back_after(write_back_after);
    let cache = builder.patience(SHORT).build().unwrap();
    let disk = Arc::new(Disk {
        inner: MemoryDevice::new(vec![1; 2 * BUFFERS * SIZE]),
        hung: AtomicBool::new(true),
        fails: AtomicBool::new(false),
        waiting: AtomicU32::new(0),
        discards: Mutex::default(),
    });
    (cache, disk)
}

fn attach(cache: &Cache, disk: &Arc<Disk>) -> Result<Device, BuildError> {
    cache.attach_with(Arc::clone(disk), AttachOptions::new().on_loss(|_| {}))
}

/// The cleaner writes blocks, and the device does not answer; then the last handle is dropped.
fn drop_while_it_writes(cache: &Cache, disk: &Arc<Disk>) {
    let told = Arc::new(Mutex::new(None));
    let tell = Arc::clone(&told);
    let options = AttachOptions::new().on_loss(move |error| *tell.lock().unwrap() = Some(error));
    let device = cache.attach_with(Arc::clone(disk), options).unwrap();
    for block in 0..BUFFERS as u64 {
        device.create(block).unwrap().fill(2);
    }
    wait_for("a write that hangs", || disk.waiting.load(Ordering::SeqCst) > 0);
    let start = Instant::now();
    drop(device);
    let most = 30 * SHORT; // one patience for each block would be 64
    assert!(start.elapsed() < most, "the drop waits for each block: {:?}", start.elapsed());
    let told = told.lock().unwrap().take();
    // The thread that drops the handle writes what became dirty after the cleaner had begun.
    let expected = matches!(told, Some(WriteError::Busy { .. } | WriteError::Io { .. }));
    assert!(expected, "{told:?}");
}

#[test]
fn inv23_a_device_is_attached_again_only_after_its_last_write_has_ended() {
    let (cache, disk) = new();
    drop_while_it_writes(&cache, &disk);
    let again = attach(&cache, &disk).err();
    assert!(matches!(again, Some(BuildError::Attached)), "{again:?}");
    disk.hung.store(false, Ordering::SeqCst);
    wait_for("the end of the last write", || attach(&cache, &disk).is_ok());
    let device = attach(&cache, &disk).unwrap();
    assert_eq!(device.get(0).unwrap()[0], 2, "the old write came first");
    device.get_mut(0).unwrap().fill(3);
    device.sync().unwrap();
    let mut bytes = [0; SIZE];
    disk.inner.read(0, &mut bytes).unwrap();
    assert_eq!(bytes[0], 3);
}

/// Its blocks are lost, and were told to be; their buffers are of use again.
#[test]
fn inv23_a_write_that_fails_after_the_last_handle_leaves_nothing_dirty() {
    let (cache, disk) = new();
    drop_while_it_writes(&cache, &disk);
    disk.fails.store(true, Ordering::SeqCst);
    disk.hung.store(false, Ordering::SeqCst);
    wait_for("the end of the last write", || attach(&cache, &disk).is_ok());
    let device = attach(&cache, &disk).unwrap();
    let pins: Vec<_> = (0..BUFFERS as u64)
        .map(|block| device.get(block).unwrap_or_else(|error| panic!("{block}: {error}")))
        .collect();
    assert!(pins.iter().all(|bytes| bytes[0] == 1));
    assert_eq!(cache.stats().dirty, 0);
}

#[test]
fn inv23_a_read_keeps_the_device_attached() {
    let (cache, disk) = new();
    let device = attach(&cache, &disk).unwrap();
    let load = device.claim(1).unwrap().unwrap();
    drop(device);
    let again = attach(&cache, &disk).err();
    assert!(matches!(again, Some(BuildError::Attached)), "{again:?}");
    load.finish(Ok(SIZE));
    attach(&cache, &disk).unwrap();
}

/// Begins a discard whose task is gone at once.
fn begin_discard(device: &Device) {
    let discard = pin!(device.discard_async(0..8));
    assert!(discard.poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

#[test]
fn inv23_a_discard_of_a_task_keeps_the_device_attached() {
    let (cache, disk) = new();
    let device = attach(&cache, &disk).unwrap();
    begin_discard(&device);
    drop(device);
    let again = attach(&cache, &disk).err();
    assert!(matches!(again, Some(BuildError::Attached)), "{again:?}");
    let range = disk.discards.lock().unwrap().pop().unwrap();
    range.finish(Ok(()));
    attach(&cache, &disk).unwrap();
}

/// The device has no handle any more, and its blocks were lost, and told to be: their buffers are of use again.
fn assert_that_nothing_is_dirty(cache: &Cache, disk: &Arc<Disk>) {
    wait_for("the end of the operation", || attach(cache, disk).is_ok());
    assert_eq!(cache.stats().dirty, 0);
    let device = attach(cache, disk).unwrap();
    let pins: Vec<_> = (0..BUFFERS as u64)
        .map(|block| device.get(block).unwrap_or_else(|error| panic!("{block}: {error}")))
        .collect();
    assert!(pins.iter().all(|bytes| bytes[0] == 1));
}

fn attach_dirty(cache: &Cache, disk: &Arc<Disk>) -> Device {
    disk.hung.store(false, Ordering::SeqCst);
    let device = attach(cache, disk).unwrap();
    for block in 0..8 {
        device.create(block).unwrap().fill(2);
    }
    device
}

#[test]
fn inv23_a_discard_that_fails_after_the_last_handle_leaves_nothing_dirty() {
    let (cache, disk) = new_with(Duration::from_secs(3600));
    let device = attach_dirty(&cache, &disk);
    begin_discard(&device);
    begin_discard(&device); // waits for the first
    drop(device);
    let range = disk.discards.lock().unwrap().pop().unwrap();
    range.finish(Err(io::Error::from_raw_os_error(libc::EIO)));
    assert!(
        disk.discards.lock().unwrap().is_empty(),
        "the second begins though the device is gone"
    );
    assert_that_nothing_is_dirty(&cache, &disk);
}

#[test]
fn inv23_a_bypass_that_fails_after_the_last_handle_leaves_nothing_dirty() {
    let (cache, disk) = new_with(Duration::from_secs(3600));
    let device = attach_dirty(&cache, &disk);
    let bypass = device.try_bypass(0..8).unwrap().unwrap();
    drop(device);
    bypass.finish(Err(io::Error::from_raw_os_error(libc::EIO))).unwrap_err();
    assert_that_nothing_is_dirty(&cache, &disk);
}
