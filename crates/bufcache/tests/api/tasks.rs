//! Calls that block, as tasks make them.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use bufcache::{Cache, Device, Fault, FaultDevice, GetError, MemoryDevice, Operation, WriteError};
use testkit::WakeCount;
use testkit::block_on;
use testkit::wait::wait_for;

const SIZE: usize = 4096;

type Disk = Arc<FaultDevice<MemoryDevice>>;

fn new() -> (Cache, Device, Disk) {
    let builder = Cache::builder(16 * SIZE).write_back_after(Duration::from_secs(3600));
    let cache = builder.dirty_limits(50, 75).patience(Duration::from_secs(5)).build().unwrap();
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![1; 64 * SIZE])));
    let device = cache.attach(Arc::clone(&disk), SIZE).unwrap();
    (cache, device, disk)
}

fn begin(future: impl Future) {
    // The call may have ended already: a thread of the cache makes it.
    let _ = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
}

#[test]
fn tasks_write_sync_discard_zero_and_close() {
    let (cache, device, disk) = new();
    block_on(async {
        let mut block = device.get_mut_async(3).await.unwrap();
        assert_eq!(block[SIZE - 1], 1);
        block.fill(3);
        drop(block);
        device.create_async(4).await.unwrap()[0] = 4;
        drop(device.get_mut_async(5).await.unwrap()); // not modified
        assert_eq!(cache.stats().dirty, 2 * SIZE);
        device.write_through_async(3..4).await.unwrap();
        assert_eq!(cache.stats().dirty, SIZE);
        device.flush_async().await.unwrap();
        let syncs = disk.count(Operation::Sync);
        device.sync_async().await.unwrap();
        assert_eq!((cache.stats().dirty, disk.count(Operation::Sync)), (0, syncs + 1));
        assert_eq!(device.get_async(4).await.unwrap()[..2], [4, 0]);
        device.discard_async(3..4).await.unwrap();
        device.zero_async(4..6).await.unwrap();
        for block in 3..6 {
            assert_eq!(device.get_async(block).await.unwrap()[0], 0);
        }
        assert_eq!(device.discard_async(64..65).await, Err(WriteError::OutOfRange));
        assert_eq!(
            device.get_mut_async(64).await.err().map(|error| error.errno()),
            Some(libc::EINVAL)
        );
        device.create_async(9).await.unwrap().fill(9);
        device.clone().close_async().await.unwrap();
        assert_eq!(device.get_mut_async(3).await.err(), Some(GetError::Closed));
    });
    let mut bytes = [0; SIZE];
    bufcache::BlockDevice::read(&*disk, 9 * SIZE as u64, &mut bytes).unwrap();
    assert_eq!(bytes[0], 9);
}

/// Each error is told once to each handle, whichever form of the call meets it.
#[test]
fn inv17_a_task_is_told_of_a_write_error_once() {
    let (_cache, device, disk) = new();
    let other = device.clone();
    device.create(1).unwrap().fill(2);
    disk.inject_next(Operation::Write, Fault::Error(libc::ENOSPC));
    let error = WriteError::Io { errno: libc::ENOSPC, block: 1 };
    assert_eq!(block_on(device.flush_async()), Err(error));
    assert_eq!(block_on(device.flush_async()), Ok(()));
    assert_eq!(block_on(other.sync_async()), Err(WriteError::Earlier { errno: libc::ENOSPC }));
    assert_eq!(other.sync(), Ok(()));
}

/// A call by a thread of the cache reports for the handle that made it.
#[test]
fn inv17_a_call_is_told_of_a_write_error_once() {
    let (_cache, device, disk) = new();
    let (caller, other) = (device.clone(), device.clone());
    device.create(1).unwrap().fill(2);
    disk.inject_next(Operation::Write, Fault::Error(libc::ENOSPC));
    device.flush().unwrap_err();
    let sync = |device: &Device| block_on(device.call_async(|device| device.sync()));
    assert_eq!(sync(&device), Ok(()), "the handle was told");
    assert_eq!(sync(&caller), Err(WriteError::Earlier { errno: libc::ENOSPC }));
    assert_eq!((sync(&caller), caller.sync()), (Ok(()), Ok(())));
    block_on(other.call_async(|device| drop(device.get(0).unwrap()))); // which reports nothing
    assert_eq!(other.sync(), Err(WriteError::Earlier { errno: libc::ENOSPC }));
    assert_eq!(sync(&other), Ok(()));
}

/// A task that gets a block of which it has a guard would wait for itself.
#[test]
fn a_task_waits_for_a_writer_no_longer_than_a_thread_does() {
    let builder = Cache::builder(16 * SIZE).patience(Duration::from_millis(100));
    let cache = builder.build().unwrap();
    let device = cache.attach(MemoryDevice::new(vec![1; 64 * SIZE]), SIZE).unwrap();
    let guard = block_on(device.get_mut_async(3)).unwrap();
    assert_eq!(block_on(device.get_async(3)).err(), Some(GetError::Busy));
    begin(device.get_async(3)); // and is gone
    drop(guard);
    let guard = device.get_mut(3).unwrap(); // the pins of both are gone
    assert_eq!(block_on(device.get_async(3)).err(), Some(GetError::Busy));
    drop(guard);
    // Two waits of one task, of which one ends early, leave the other its time.
    let device = &device;
    let get = |block| -> Got<'_> { Box::pin(async move { device.get_async(block).await.err() }) };
    let (mut ends, mut waits) = (get(2), get(1));
    let woken = WakeCount::new();
    let waker = woken.waker();
    let mut context = Context::from_waker(&waker);
    let first = device.get_mut(1).unwrap();
    let second = block_on(device.get_mut_async(2)).unwrap();
    assert!(ends.as_mut().poll(&mut context).is_pending());
    assert!(waits.as_mut().poll(&mut context).is_pending());
    drop(second);
    assert_eq!(ends.as_mut().poll(&mut context), Poll::Ready(None));
    let before = woken.count();
    wait_for("the end of the patience", || woken.count() > before);
    assert_eq!(waits.as_mut().poll(&mut context), Poll::Ready(Some(GetError::Busy)));
    drop(first);
}

type Got<'d> = Pin<Box<dyn Future<Output = Option<GetError>> + 'd>>;

#[test]
fn inv23_a_call_goes_on_when_its_task_is_gone() {
    let (cache, device, disk) = new();
    device.create(1).unwrap().fill(2);
    disk.inject_next(Operation::Write, Fault::Delay(Duration::from_millis(50)));
    begin(device.sync_async());
    wait_for("the sync", || cache.stats().syncs == 1);
    assert_eq!(cache.stats().dirty, 0);
    // A guard that comes too late is dropped: others get the block.
    let held = device.get_mut(1).unwrap();
    begin(device.get_mut_async(1));
    thread::sleep(Duration::from_millis(20));
    drop(held);
    device.get_mut(1).unwrap().fill(3);
    // A future that is never polled does nothing.
    drop(device.discard_async(0..8));
    assert_eq!(device.get(1).unwrap()[0], 3);
    begin(device.close_async());
    wait_for("the close", || cache.stats().syncs == 2);
}

/// Its holder moves to another thread, and others wait for it: threads, tasks and syncs.
#[test]
fn inv15_an_owned_guard_is_waited_for() {
    let (_cache, device, disk) = new();
    let mut guard = block_on(device.get_mut_async(1)).unwrap();
    guard.fill(2);
    assert_eq!(device.try_get(1).err(), Some(GetError::WouldBlock));
    thread::scope(|scope| {
        let reads = scope.spawn(|| device.get(1).unwrap()[SIZE - 1]);
        let task = scope.spawn(|| block_on(device.get_mut_async(1)).unwrap()[0]);
        let syncs = scope.spawn(|| device.sync());
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(50));
            guard.fill(7);
        });
        assert_eq!((reads.join().unwrap(), task.join().unwrap()), (7, 7));
        assert_eq!(syncs.join().unwrap(), Ok(()));
    });
    device.sync().unwrap();
    let mut bytes = [0; SIZE];
    bufcache::BlockDevice::read(&*disk, SIZE as u64, &mut bytes).unwrap();
    assert_eq!(bytes[0], 7);
}

#[test]
fn inv25_calls_of_a_device_that_hangs_delay_no_other() {
    let (cache, device, disk) = new();
    disk.inject(Operation::Sync, .., Fault::Delay(Duration::from_secs(3)));
    for _ in 0..40 {
        begin(device.sync_async());
    }
    let other = cache.attach(MemoryDevice::new(vec![1; 64 * SIZE]), SIZE).unwrap();
    let began = std::time::Instant::now();
    block_on(async {
        other.create_async(1).await.unwrap().fill(2);
        other.sync_async().await.unwrap();
        assert_eq!(other.get_async(2).await.unwrap()[0], 1);
    });
    assert!(began.elapsed() < Duration::from_secs(2));
    disk.heal();
}

/// Its block was not there, so the call takes a buffer that has the bytes of another block.
#[test]
fn inv03_a_create_whose_task_is_gone_leaves_zeros() {
    let (_cache, device, _disk) = new();
    for block in 0..16 {
        device.create(block).unwrap().fill(7);
    }
    device.sync().unwrap();
    for block in 16..32 {
        begin(device.create_async(block));
        wait_for("the create", || device.is_cached(block));
        assert!(device.get(block).unwrap().iter().all(|&byte| byte == 0), "block {block}");
    }
    device.sync().unwrap();
    device.invalidate(16).unwrap();
    assert!(device.get(16).unwrap().iter().all(|&byte| byte == 0), "it was clean");
}

/// No thread needs a buffer, and the cleaner has nothing to do for an hour.
#[test]
fn inv26_tasks_that_only_write_wait_for_the_device() {
    for create in [false, true] {
        let (cache, device, _disk) = new();
        for block in 0..64 {
            let guard = block_on(async {
                if create {
                    device.create_async(block).await
                } else {
                    device.get_mut_async(block).await
                }
            });
            guard.unwrap_or_else(|error| panic!("block {block}: {error}")).fill(7);
        }
        assert_eq!(cache.stats().get, 64);
    }
}
