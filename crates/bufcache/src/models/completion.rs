//! Changes that another thread ends, and the thread that waits for them.

#[cfg(offlock_shuttle)]
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
#[cfg(offlock_shuttle)]
use std::task::{Context, Poll, Waker};

use crate::{AttachOptions, BlockDevice, Change, Device, DeviceChange, WriteError};
#[cfg(offlock_shuttle)]
use offlock_sync::model;
use offlock_sync::{Mutex, thread};

use super::task::block_on;
use super::world::{BLOCKS, LONG, SIZE, builder, thoroughly};

type Threads = Arc<Mutex<Vec<thread::JoinHandle<()>>>>;

/// Another thread fails each write, and drops each sync.
struct Elsewhere {
    threads: Threads,
    _own: Option<Own>,
}

/// Tells whether the thread that made it drops it.
struct Own(thread::ThreadId, Arc<AtomicBool>);

impl Drop for Own {
    fn drop(&mut self) {
        self.1.store(thread::current().id() == self.0, Relaxed);
    }
}

impl BlockDevice for Elsewhere {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        Ok(buf.len())
    }

    fn begin(&self, change: DeviceChange) {
        let is_sync = matches!(change.change(), Change::Sync);
        let fail = |write: DeviceChange| write.finish(Err(io::Error::from_raw_os_error(libc::EIO)));
        let ends = move || if is_sync { drop(change) } else { fail(change) };
        self.threads.lock().push(thread::spawn(ends));
    }
}

fn world(own: Option<Own>) -> (Threads, Device) {
    let threads = Threads::default();
    let elsewhere = Elsewhere { threads: Arc::clone(&threads), _own: own };
    let options = AttachOptions::new().on_loss(|_| {});
    let disk = builder(1, LONG).build().unwrap().attach_with(elsewhere, options).unwrap();
    (threads, disk)
}

fn join(threads: &Threads) {
    let threads = std::mem::take(&mut *threads.lock());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn inv17_a_write_of_a_task_that_another_thread_fails() {
    thoroughly(|| {
        let (threads, disk) = world(None);
        disk.create(1).unwrap().fill(1);
        let told = block_on(disk.flush_async());
        assert_eq!(told, Err(WriteError::Io { errno: libc::EIO, block: 1 }));
        assert!(disk.is_newer(1..2));
        assert_eq!(disk.invalidate(1), Ok(true)); // so that the end of the device writes nothing
        join(&threads);
    });
}

#[test]
fn inv18_a_sync_that_another_thread_drops() {
    thoroughly(|| {
        let (threads, disk) = world(None);
        assert_eq!(disk.sync(), Err(WriteError::Poisoned { errno: libc::ECANCELED }));
        join(&threads);
    });
}

/// The task is gone before its write has ended, or behind that.
#[cfg(offlock_shuttle)] // more than loom does in a minute
#[test]
fn inv23_a_write_goes_on_when_its_task_is_gone() {
    model(|| {
        let (threads, disk) = world(None);
        disk.create(1).unwrap().fill(1);
        let mut flush = Box::pin(disk.flush_async());
        let _ = flush.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        drop(flush);
        join(&threads);
        // Nothing is marked, and the handle has not been told of the error.
        disk.get_mut(1).unwrap().fill(2);
        assert_eq!(disk.invalidate(1), Ok(true));
        assert_eq!(disk.flush(), Err(WriteError::Earlier { errno: libc::EIO }));
    });
}

#[cfg(offlock_shuttle)] // more than loom does in a minute
#[test]
fn inv18_a_sync_of_a_task_beside_another() {
    model(|| {
        let (threads, disk) = world(None);
        let mut first = Box::pin(disk.sync_async());
        let polled = first.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        // It waits for the one that runs, or that one is over. Either has failed.
        assert!(block_on(disk.sync_async()).is_err());
        let told = if let Poll::Ready(told) = polled { told } else { block_on(first) };
        assert!(told.is_err());
        join(&threads);
    });
}

#[test]
fn inv23_a_device_does_not_go_in_the_thread_that_ends_a_sync() {
    thoroughly(|| {
        let is_own = Arc::default();
        let (threads, disk) = world(Some(Own(thread::current().id(), Arc::clone(&is_own))));
        assert!(disk.sync().is_err());
        drop(disk);
        join(&threads);
        assert!(is_own.load(Relaxed));
    });
}
