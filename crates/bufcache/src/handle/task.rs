//! Calls for tasks. A write-back or a sync goes on in the threads that end its steps; what may block otherwise is called
//! by a thread of the cache, which then wakes the task.
//!
//! Nothing here knows a runtime. A future begins its call when it is first polled; if it is dropped the call
//! goes on, and its result is dropped.

use std::ops::Range;

use percpu::sync::Arc;
use percpu::sync::atomic::{AtomicU64, Ordering};

use super::Device;
use crate::cache::{Fill, Wipe};
use crate::dirty::WriteError;
use crate::error::GetError;
use crate::guard::OwnedWriteGuard;
use crate::wait::{Mode, run};
use crate::word::Key;
use crate::write::CloseError;

impl Device {
    /// Has a thread of the cache make a call of this device that blocks, and waits for its end: for what has no
    /// form for tasks. The calling thread makes the call only if there can be no other.
    ///
    /// A few threads at most make calls of one device, so one that hangs leaves threads to the others. Dropping the
    /// future once it was polled leaves the call going.
    ///
    /// ```
    /// use bufcache::{Cache, MemoryDevice};
    /// # use testkit::block_on;
    ///
    /// let disk = Cache::new(1 << 20)?.attach(MemoryDevice::new(vec![0; 100_000]), 4096)?;
    /// # block_on(async {
    /// disk.call_async(|disk| disk.write_past(3, &[7; 8192])).await?;
    /// assert_eq!(disk.get_async(4).await?[0], 7);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the call does.
    pub async fn call_async<T: Send + 'static>(
        &self,
        call: impl FnOnce(Self) -> T + Send + 'static,
    ) -> T {
        let mut device = self.clone();
        // The call is told of the write errors that this handle has not been told of.
        device.seen = AtomicU64::new(self.seen.load(Ordering::Relaxed)); // of one handle
        call_by(device, call).await
    }

    /// The buffer of a block, to be written, as [`get_mut`](Self::get_mut), for tasks; the guard may move to
    /// other threads.
    ///
    /// ```
    /// use bufcache::{Cache, MemoryDevice};
    /// # use testkit::block_on;
    ///
    /// let disk = Cache::new(1 << 20)?.attach(MemoryDevice::new(vec![0; 100_000]), 4096)?;
    /// # block_on(async {
    /// let mut block = disk.get_mut_async(3).await?;
    /// block[..5].copy_from_slice(b"hello");
    /// drop(block);
    /// disk.sync_async().await?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`get_mut`](Self::get_mut): where all buffers are in use, a thread of the cache waits for one.
    pub async fn get_mut_async(&self, block: u64) -> Result<OwnedWriteGuard, GetError> {
        let key = self.checked_key(block)?;
        if self.is_cached(block) {
            self.shared.counters.get.add(1);
        } else {
            match self.get_async(block).await {
                // The call that locks it waits for a buffer.
                Ok(_) | Err(GetError::NoFreeBuffers) => {}
                Err(error) => return Err(error),
            }
        }
        self.lock_async(key, Fill::Read).await
    }

    /// The buffer of a block, of zeros, as [`create`](Self::create), for tasks. If the future is dropped once it was
    /// polled, the block may be zeros, and dirty.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create).
    pub async fn create_async(&self, block: u64) -> Result<OwnedWriteGuard, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        self.lock_async(key, Fill::Caller).await
    }

    /// The get is counted by the caller.
    async fn lock_async(&self, key: Key, fill: Fill) -> Result<OwnedWriteGuard, GetError> {
        // On the thread that took the lock: a task that is gone lets the guard drop, which publishes the buffer.
        let own = move |device: Self, held| {
            let source = Arc::clone(&device.source);
            let mut guard = OwnedWriteGuard::new(device, held);
            if fill == Fill::Caller {
                source.writes.forget_load(&source.sectors(key));
                guard.fill(0);
            }
            guard
        };
        // Where too much is dirty, the call writes some of it first.
        if !self.shared.must_clean(&self.source) {
            match self.shared.try_lock_write(&self.source, key, self.class) {
                Err(GetError::WouldBlock) => {}
                locked => return locked.map(|held| own(self.clone(), held)),
            }
        }
        let lock = move |device: Self| {
            let held = device.shared.lock_write(&device.source, key, device.class, fill)?;
            Ok(own(device, held))
        };
        self.call_async(lock).await
    }

    /// [`flush`](Self::flush), for tasks.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush).
    pub async fn flush_async(&self) -> Result<(), WriteError> {
        let source = Arc::clone(&self.source);
        let result = run(async move { source.cache.flush(&source, Mode::Task).await }).await;
        self.or_earlier(result)
    }

    /// [`sync`](Self::sync), for tasks.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync).
    pub async fn sync_async(&self) -> Result<(), WriteError> {
        let source = Arc::clone(&self.source);
        let result = run(async move { source.cache.sync(&source, Mode::Task).await }).await;
        self.or_earlier(result)
    }

    /// [`write_through`](Self::write_through), for tasks.
    ///
    /// # Errors
    ///
    /// As [`write_through`](Self::write_through).
    pub async fn write_through_async(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        let source = Arc::clone(&self.source);
        let write = async move { source.cache.write_through(&source, blocks, Mode::Task).await };
        let result = run(write).await;
        self.or_earlier(result)
    }

    /// [`discard`](Self::discard), for tasks.
    ///
    /// # Errors
    ///
    /// As [`discard`](Self::discard).
    pub async fn discard_async(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.wipe_async(blocks, Wipe::Discard).await
    }

    /// [`zero`](Self::zero), for tasks.
    ///
    /// # Errors
    ///
    /// As [`zero`](Self::zero).
    pub async fn zero_async(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        match self.wipe_async(blocks.clone(), Wipe::Zero).await {
            Err(WriteError::Io { errno: libc::EOPNOTSUPP, .. }) => {}
            result => return result,
        }
        call_by(self.clone(), move |device| device.zero_by_cache(blocks)).await
    }

    async fn wipe_async(&self, blocks: Range<u64>, how: Wipe<'static>) -> Result<(), WriteError> {
        self.check_range(&blocks)?;
        let source = Arc::clone(&self.source);
        run(async move { source.cache.wipe(&source, blocks, how, Mode::Task).await }).await
    }

    /// [`close`](Self::close), for tasks. Dropping the future leaves the close going: if it fails then, it is as
    /// if the last handle had been dropped without a close.
    ///
    /// # Errors
    ///
    /// As [`close`](Self::close).
    pub async fn close_async(self) -> Result<(), CloseError> {
        call_by(self, Self::close).await
    }
}

/// Has a thread of the cache make a call of that handle.
async fn call_by<T: Send + 'static>(
    device: Device,
    call: impl FnOnce(Device) -> T + Send + 'static,
) -> T {
    let shared = Arc::clone(&device.shared);
    let called = shared.call(device.source.id, move || call(device));
    drop(shared);
    called.wait().await.expect("a call of the cache panics only if the device does")
}
