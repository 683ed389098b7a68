//! Tasks that stop waiting. Nothing of them is kept, and a wake-up costs what it wakes.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::Context;
use std::thread;
use std::time::Duration;

use bufcache::{BlockDevice, Cache, Device, WriteError};

use bufcache_test::{Begun, KeptDevice};
use testkit::wait::wait_for;
use testkit::{WakeCount, block_on};

const SIZE: usize = 512;
const BLOCKS: u64 = 64;

/// Releases a device in its drop: the drop of a handle waits for the device.
struct Releases(Arc<KeptDevice>);

impl Drop for Releases {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// A device that ends no operation before it is released, attached to a cache.
fn hung(patience: Duration) -> (Arc<KeptDevice>, Device) {
    let kept = Arc::new(KeptDevice::new(BLOCKS as usize * SIZE));
    let builder = Cache::builder(32 * SIZE).block_size(SIZE).patience(patience);
    let builder = builder.write_back_after(Duration::from_secs(3600)).dirty_limits(80, 90);
    let device = builder.build().unwrap().attach(Arc::clone(&kept)).unwrap();
    (kept, device)
}

type Task<'d> = Pin<Box<dyn Future<Output = ()> + 'd>>;
type Begin = for<'d> fn(&'d Device) -> Task<'d>;

fn task<'d, T>(future: impl Future<Output = T> + 'd) -> Task<'d> {
    Box::pin(async { drop(future.await) })
}

/// Polls once. Returns whether the task waits.
fn begin(task: &mut Task<'_>, woken: &Arc<WakeCount>) -> bool {
    let waker = woken.waker();
    task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending()
}

/// Each wait of a task is dropped while the device hangs.
#[test]
fn a_wait_that_is_dropped_keeps_nothing_of_its_task() {
    let (hung, disk) = &hung(Duration::from_secs(60));
    let _releases = Releases(Arc::clone(hung));
    let _written = block_on(disk.create_async(1)).unwrap();
    drop(block_on(disk.create_async(2)).unwrap());
    let _pinned = block_on(disk.get_async(2)).unwrap();
    let mut first = task(disk.get_mut_async(2));
    assert!(begin(&mut first, &WakeCount::new()));
    let mut discard = task(disk.discard_async(4..5));
    assert!(begin(&mut discard, &WakeCount::new()));
    let (end, ended) = mpsc::channel::<()>();
    drop(block_on(disk.create_async(3)).unwrap());
    let waits: Vec<(&str, Task<'_>)> = vec![
        ("a load", task(disk.get_async(0))),
        ("a writer", task(disk.get_async(1))),
        ("a discard", task(disk.get_async(4))),
        ("a discard before a discard", task(disk.discard_async(3..5))),
        ("a writer before a writer", task(disk.get_mut_async(1))),
        ("a pin, in line", task(disk.get_mut_async(2))),
        ("a flush", task(disk.flush_async())),
        ("a sync", task(disk.sync_async())),
        ("a durable write", task(disk.write_through_async(3..4))),
        ("a call", task(disk.call_async(move |_| ended.recv()))),
        ("a close", task(disk.clone().close_async())),
    ];
    let mut kept = Vec::new();
    for (what, mut wait) in waits {
        let woken = WakeCount::new();
        assert!(begin(&mut wait, &woken), "no wait: {what}");
        drop(wait);
        if Arc::strong_count(&woken) != 1 {
            kept.push(what);
        }
    }
    drop(first);
    drop(end);
    assert!(kept.is_empty(), "the task is kept: {kept:?}");
    drop((_written, _pinned));
    // The operations that have lost their tasks end all the same.
    hung.release();
    wait_for("the close", || disk.sync() == Err(WriteError::Closed));
    assert_eq!((hung.loads().len(), hung.writes().len(), hung.ranges().len()), (0, 0, 0));
}

/// The device of a close that fails without its task is dropped by the thread that ends the
/// operations of the device, which must not wait for the next one.
#[test]
fn inv23_the_thread_that_ends_a_close_does_not_wait_for_the_device() {
    let (hung, disk) = hung(Duration::from_secs(60));
    let _releases = Releases(Arc::clone(&hung));
    block_on(disk.create_async(1)).unwrap().fill(7);
    let mut close = task(disk.close_async());
    assert!(begin(&mut close, &WakeCount::new()));
    drop(close);
    hung.refuse(0..u64::MAX, libc::EIO);
    assert_eq!(hung.end_writes(), 1);
    hung.refuse(0..0, 0);
    assert_eq!(hung.end_syncs(), 1);
    wait_for("the drop of the device", || Arc::strong_count(&hung) == 2);
    assert_eq!(hung.blocked(), ["bufcache"]);
    let mut bytes = [0; SIZE];
    hung.read(SIZE as u64, &mut bytes).unwrap();
    assert_eq!(bytes, [7; SIZE]);
}

/// A release while an operation begins ends that operation, too.
#[test]
fn a_released_device_keeps_no_operation() {
    let (hung, disk) = hung(Duration::from_secs(60));
    let _releases = Releases(Arc::clone(&hung));
    let loads = hung.loads();
    let reads = thread::spawn(move || disk.get(1).map(drop));
    wait_for("the load", || hung.begun() == 1);
    thread::sleep(Duration::from_millis(20)); // it has asked what to do, and waits for `loads`
    hung.does(Begun::Ended);
    drop(loads);
    wait_for("the end of the load", || reads.is_finished());
}

/// Returns the time that this thread has run: other programs do not change it.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call stores one `timespec` to `time`.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the time that `count` tasks take to begin a wait and to be woken.
fn wake(count: usize, wait: Begin) -> Duration {
    let (hung, disk) = &hung(Duration::from_secs(600));
    let _releases = Releases(Arc::clone(hung));
    let written = block_on(disk.create_async(1)).unwrap();
    let mut discard = task(disk.discard_async(2..3));
    assert!(begin(&mut discard, &WakeCount::new()));
    let woken: Vec<_> = (0..count).map(|_| WakeCount::new()).collect();
    let began = cpu_time();
    let mut waits: Vec<_> = woken.iter().map(|_| wait(disk)).collect();
    for (wait, woken) in waits.iter_mut().zip(&woken) {
        assert!(begin(wait, woken));
    }
    drop(written);
    hung.release();
    let time = cpu_time() - began;
    assert!(woken.iter().all(|woken| woken.count() > 0));
    time
}

/// Sixteen times as many tasks take sixteen times as long, not 256 times.
#[test]
fn a_wake_up_costs_what_it_wakes() {
    let waits: [(&str, Begin); 3] = [
        ("a load", |disk| task(disk.get_async(0))),
        ("a writer", |disk| task(disk.get_async(1))),
        ("a discard", |disk| task(disk.get_async(2))),
    ];
    for (what, wait) in waits {
        let least = |count| (0..3).map(|_| wake(count, wait)).min().unwrap();
        let (few, many) = (least(1_000), least(16_000));
        assert!(many < 64 * few, "{what}: {few:?} for 1,000 tasks, {many:?} for 16,000");
    }
}
