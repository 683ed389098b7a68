//! A panic of a device, verifier or callback, and of what these drop, ends no thread of the cache and leaves no
//! block marked.

use std::io::{PipeReader, PipeWriter};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;

use crate::world::*;

/// A panic's payload whose drop panics.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload is dropped");
    }
}

/// A drop that panics, once it has set the flag.
struct BadDrop(Arc<AtomicBool>);

impl Drop for BadDrop {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
        panic!("the device is dropped");
    }
}

fn disk() -> FaultDevice<MemoryDevice> {
    FaultDevice::new(MemoryDevice::new(vec![7; 64 * SIZE]))
}

fn cache(patience: Duration) -> Cache {
    let builder = Cache::builder(64 * SIZE).block_size(SIZE).patience(patience);
    builder.write_back_after(Duration::ZERO).build().unwrap()
}

fn attach(cache: &Cache, disk: impl IntoDevice) -> Device {
    cache.attach_with(disk, AttachOptions::new().on_loss(|_| {})).unwrap()
}

fn dirty(disk: &Device, block: u64) {
    disk.create(block).unwrap().fill(1);
}

/// Fails unless tasks are served by the threads that read for them, and dirty blocks are written without a sync.
fn all_threads_are_there(cache: &Cache) {
    let device = attach(cache, disk());
    dirty(&device, 3);
    wait_for("the cleaner writes", || cache.stats().dirty == 0);
    in_time("a read for a task", move || {
        (10..20).for_each(|block| assert_eq!(block_on(device.get_async(block)).unwrap()[0], 7));
    });
}

/// The operation ends after the last handle: the thread that makes it is the last to have the device.
#[test]
fn a_device_whose_drop_panics_leaves_the_threads_of_the_cache() {
    type Begin = fn(&Cache, &Device);
    let begins: [Begin; 3] = [
        |_, device| device.readahead(0..1),
        |_, device| {
            let mut task = Box::pin(device.get_async(1));
            let mut context = Context::from_waker(Waker::noop());
            assert!(task.as_mut().poll(&mut context).is_pending());
        },
        |cache, device| {
            dirty(device, 1);
            wait_for("the cleaner writes", || cache.stats().write_calls > 0);
        },
    ];
    for begin in begins {
        // The end of the last handle waits for the device's operations as long as this.
        let cache = cache(Duration::from_millis(1));
        let [dropped, has_no_handle] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let disk = disk();
        let (bad, may_end) = (BadDrop(Arc::clone(&dropped)), Arc::clone(&has_no_handle));
        disk.on_operation(move |operation, _| {
            let _dropped_with_this = &bad;
            if operation != Operation::Sync {
                wait_for("the last handle", || may_end.load(Relaxed));
            }
        });
        let device = attach(&cache, disk);
        begin(&cache, &device);
        drop(device);
        has_no_handle.store(true, Relaxed);
        wait_for("the device is dropped", || dropped.load(Relaxed));
        all_threads_are_there(&cache);
    }
}

/// Of each kind of operation, and of the verifier.
#[test]
fn a_payload_whose_drop_panics_ends_its_operation_and_no_thread() {
    let cache = cache(Duration::from_secs(60));
    let disk = Arc::new(disk());
    let is_armed = Arc::new(AtomicBool::new(false));
    let explode = Arc::clone(&is_armed);
    let explode = move || {
        if explode.swap(false, Relaxed) {
            panic_any(Bomb);
        }
    };
    let verifier = explode.clone();
    disk.on_operation(move |_, offset| {
        if offset < 40 * SIZE as u64 {
            explode();
        }
    });
    let options = AttachOptions::new().verify(move |block, _| {
        if block >= 40 {
            verifier();
        }
        true
    });
    let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
    let exploded = || wait_for("the panic", || !is_armed.load(Relaxed));
    is_armed.store(true, Relaxed);
    device.readahead(1..2);
    exploded();
    for block in [2, 42] {
        is_armed.store(true, Relaxed);
        let read = block_on(device.get_async(block)).map(drop);
        assert_eq!(read, Err(GetError::Panicked { block }));
    }
    is_armed.store(true, Relaxed);
    dirty(&device, 1);
    exploded(); // a write of the cleaner
    all_threads_are_there(&cache);
    in_time("a sync", move || {
        // The handle is told of the panic once, and the block has no mark.
        assert!(device.sync().is_err());
        assert_eq!(device.sync(), Ok(()));
        assert_eq!(device.get_mut(1).unwrap()[0], 1);
        device.flush().unwrap();
        is_armed.store(true, Relaxed);
        let poisoned = WriteError::Poisoned { errno: libc::EIO };
        assert_eq!([device.sync(), device.sync()], [Err(poisoned), Err(poisoned)]);
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
    let cache = cache(Duration::from_secs(60));
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
        let disk = disk();
        disk.inject(Operation::Write, .., Fault::Error(libc::ENOSPC));
        let device = cache(Duration::from_secs(60)).attach(disk).unwrap();
        dirty(&device, 1);
        return drop(device);
    }
    let (reader, writer): (PipeReader, PipeWriter) = io::pipe().unwrap();
    drop(reader);
    let name = "panics::a_loss_is_no_panic_where_the_standard_error_is_broken";
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").stderr(writer);
    assert!(child.status().unwrap().success());
}
