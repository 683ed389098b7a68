//! A panic of a device, verifier or callback, and of what these drop, ends no thread of the cache and leaves no
//! block marked.
#![cfg(not(offlock_model))]

use std::io::{self, PipeReader, PipeWriter};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bufcache::{AttachOptions, BlockDevice, Builder, Cache, Device, GetError, WriteError};
use testkit::block_on::block_on;
use testkit::wait::{in_time, wait_for};

const SIZE: usize = 512;

/// A panic's payload whose drop panics.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload is dropped");
    }
}

/// Reads as sevens, and takes all writes.
#[derive(Default)]
struct Disk {
    /// Reads wait for this flag.
    reads_wait_for: Option<Arc<AtomicBool>>,
    /// Writes wait for this flag.
    writes_wait_for: Option<Arc<AtomicBool>>,
    /// Writes fail.
    full: bool,
    _drop: BadDrop,
    /// The next read, write or sync panics with a `Bomb`.
    bomb: AtomicBool,
}

impl Disk {
    fn explode(&self) {
        if self.bomb.swap(false, Relaxed) {
            panic_any(Bomb);
        }
    }
}

fn wait_for_flag(flag: &Option<Arc<AtomicBool>>) {
    wait_for("the flag", || flag.as_ref().is_none_or(|flag| flag.load(Relaxed)));
}

/// A drop that panics, once it has set the flag.
#[derive(Default)]
struct BadDrop(Option<Arc<AtomicBool>>);

impl Drop for BadDrop {
    fn drop(&mut self) {
        if let Some(dropped) = &self.0 {
            dropped.store(true, Relaxed);
            panic!("the device is dropped");
        }
    }
}

fn bad_drop() -> (Arc<AtomicBool>, BadDrop) {
    let dropped = Arc::new(AtomicBool::new(false));
    (Arc::clone(&dropped), BadDrop(Some(dropped)))
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        64 * SIZE as u64
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        wait_for_flag(&self.reads_wait_for);
        self.explode();
        buf.fill(7);
        Ok(buf.len())
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        wait_for_flag(&self.writes_wait_for);
        self.explode();
        if self.full { Err(io::Error::from_raw_os_error(libc::ENOSPC)) } else { Ok(()) }
    }

    fn sync(&self) -> io::Result<()> {
        self.explode();
        Ok(())
    }
}

fn builder() -> Builder {
    let builder = Cache::builder(64 * SIZE).block_size(SIZE);
    builder.write_back_after(Duration::ZERO)
}

fn cache() -> Cache {
    builder().build().unwrap()
}

/// Fails unless tasks are served by the thread that reads for them.
fn reads_ahead(cache: &Cache) {
    let disk = cache.attach(Disk::default()).unwrap();
    in_time("a read for a task", move || {
        assert_eq!(block_on(disk.get_async(3)).unwrap()[0], 7);
    });
}

fn dirty(disk: &Device, block: u64) {
    disk.create(block).unwrap().fill(1);
}

/// Fails unless dirty blocks are written without a sync.
fn cleans(cache: &Cache) {
    let disk = cache.attach(Disk::default()).unwrap();
    dirty(&disk, 3);
    wait_for("the cleaner writes", || cache.stats().dirty == 0);
}

#[test]
fn a_device_whose_drop_panics_leaves_the_thread_that_reads_ahead() {
    // The end of the last handle waits for the device's operations as long as this. The read ends after it.
    let cache = builder().patience(Duration::from_millis(1)).build().unwrap();
    let has_no_handle = Arc::new(AtomicBool::new(false));
    let (dropped, _drop) = bad_drop();
    let reads_wait_for = Some(Arc::clone(&has_no_handle));
    let disk = Disk { reads_wait_for, _drop, ..Disk::default() };
    cache.attach(disk).unwrap().readahead(0..1);
    has_no_handle.store(true, Relaxed);
    wait_for("the device is dropped", || dropped.load(Relaxed));
    reads_ahead(&cache);
    // The same, where a task's load is the last to have the device.
    has_no_handle.store(false, Relaxed);
    let (dropped, _drop) = bad_drop();
    let reads_wait_for = Some(Arc::clone(&has_no_handle));
    let disk = Disk { reads_wait_for, _drop, ..Disk::default() };
    let disk = cache.attach(disk).unwrap();
    let mut task = Box::pin(async move { disk.get_async(1).await.map(drop) });
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(task.as_mut().poll(&mut context).is_pending());
    drop(task);
    has_no_handle.store(true, Relaxed);
    wait_for("the device is dropped", || dropped.load(Relaxed));
    reads_ahead(&cache);
}

#[test]
fn a_payload_whose_drop_panics_leaves_the_thread_that_reads_ahead() {
    let cache = cache();
    let device = Arc::new(Disk { bomb: AtomicBool::new(true), ..Disk::default() });
    let disk = cache.attach(Arc::clone(&device)).unwrap();
    disk.readahead(1..2);
    wait_for("it is read ahead", || !device.bomb.load(Relaxed));
    reads_ahead(&cache);
    device.bomb.store(true, Relaxed);
    let read = block_on(disk.get_async(2)).map(drop);
    assert_eq!(read, Err(GetError::Panicked { block: 2 }));
    reads_ahead(&cache);
}

#[test]
fn a_verifier_whose_payload_panics_ends_the_load() {
    let cache = cache();
    let options = AttachOptions::new().verify(|_, _| panic_any(Bomb));
    let disk = cache.attach_with(Disk::default(), options).unwrap();
    in_time("a task", move || {
        let read = block_on(disk.get_async(2)).map(drop);
        assert_eq!(read, Err(GetError::Panicked { block: 2 }));
    });
    reads_ahead(&cache);
}

#[test]
fn a_device_whose_drop_panics_leaves_the_cleaner() {
    // The end of the last handle waits for the cleaner as long as this. The write ends after it, when the cleaner
    // alone has the device.
    let cache = builder().patience(Duration::from_millis(1)).build().unwrap();
    let (dropped, _drop) = bad_drop();
    let options = AttachOptions::new().on_loss(|_| {});
    let has_no_handle = Arc::new(AtomicBool::new(false));
    let writes_wait_for = Some(Arc::clone(&has_no_handle));
    let disk = Disk { writes_wait_for, _drop, ..Disk::default() };
    let disk = cache.attach_with(disk, options).unwrap();
    dirty(&disk, 1);
    wait_for("the cleaner writes", || cache.stats().write_calls > 0);
    drop(disk);
    has_no_handle.store(true, Relaxed);
    wait_for("the device is dropped", || dropped.load(Relaxed));
    cleans(&cache);
}

#[test]
fn a_write_whose_payload_panics_leaves_the_cleaner_and_no_mark() {
    let cache = cache();
    let device = Arc::new(Disk { bomb: AtomicBool::new(true), ..Disk::default() });
    let disk = cache.attach(Arc::clone(&device)).unwrap();
    dirty(&disk, 1);
    wait_for("the cleaner writes", || !device.bomb.load(Relaxed));
    cleans(&cache);
    in_time("a sync", move || {
        // The handle is told of the panic once.
        assert!(disk.sync().is_err());
        assert_eq!(disk.sync(), Ok(()));
        assert_eq!(disk.get_mut(1).unwrap()[0], 1);
    });
}

#[test]
fn a_sync_whose_payload_panics_ends() {
    let cache = cache();
    let device = Arc::new(Disk::default());
    let disk = cache.attach(Arc::clone(&device)).unwrap();
    dirty(&disk, 1);
    disk.flush().unwrap();
    device.bomb.store(true, Relaxed);
    in_time("a sync", move || {
        let poisoned = WriteError::Poisoned { errno: libc::EIO };
        assert_eq!([disk.sync(), disk.sync()], [Err(poisoned), Err(poisoned)]);
    });
}

/// Panics when the cache asks whether it is read only.
struct Shy;

impl BlockDevice for Shy {
    fn len(&self) -> u64 {
        64 * SIZE as u64
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some((1, 2))
    }

    fn is_read_only(&self) -> bool {
        panic!("is it read only?")
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        Ok(buf.len())
    }
}

#[test]
fn a_device_that_panics_while_it_is_attached_is_not_attached() {
    let cache = cache();
    for _ in 0..2 {
        let attached = catch_unwind(AssertUnwindSafe(|| cache.attach(Shy).map(drop)));
        assert!(attached.is_err(), "{attached:?}");
    }
}

const CHILD: &str = "BUFCACHE_TEST_STDERR";

/// A line on a standard error that has no reader left is not worth a panic.
#[test]
fn a_loss_is_no_panic_where_the_standard_error_is_broken() {
    if std::env::var_os(CHILD).is_some() {
        let disk = cache().attach(Disk { full: true, ..Disk::default() }).unwrap();
        dirty(&disk, 1);
        return drop(disk);
    }
    let (reader, writer): (PipeReader, PipeWriter) = io::pipe().unwrap();
    drop(reader);
    let name = "a_loss_is_no_panic_where_the_standard_error_is_broken";
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").stderr(writer);
    assert!(child.status().unwrap().success());
}
