//! Calls for tasks of any runtime.
//!
//! Each step of a write-back, a sync or a discard runs on the thread that ends the step before. Other
//! calls that may block run on a thread of the cache, which then wakes the task. A future begins its
//! call when it is first polled. Dropping the future does not cancel the call, but ends a wait for
//! the holder of a block. The errors are those of the blocking form.

use std::ops::Range;

use offlock_sync::Arc;
use offlock_sync::atomic::{AtomicU64, Ordering};

use super::{Device, OwnedWriteGuard};
use crate::cache::{Fill, Overwrite};
use crate::dirty::WriteError;
use crate::error::GetError;
use crate::wait::run;
use crate::word::Key;

impl Device {
    /// Makes a blocking call of this device on a thread of the cache, for calls without an `_async`
    /// form. The calling thread makes the call only if no thread can be started.
    ///
    /// At most 16 calls of one device run at the same time, beside the operations of the device
    /// itself, for which a call may wait. So a device that hangs does not delay the others.
    ///
    /// The call reports write errors as this handle does. Two calls at the same time may both report
    /// one error. Panics if the call does.
    pub async fn call_async<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        let device = self.same_seen();
        let call = move || (call(&device), device.seen.load(Ordering::Relaxed));
        let called = self.shared.call(self.source.id, call);
        let called = called.wait().await;
        self.see(called.expect("a call of the cache panics only if the device does"))
    }

    /// Returns a clone that has seen the same errors.
    fn same_seen(&self) -> Self {
        // Ordering: Relaxed, here and in `see`; as in `Writes::take_new_error`.
        Self { seen: AtomicU64::new(self.seen.load(Ordering::Relaxed)), ..self.clone() }
    }

    /// Notes the errors that the clone of a call has seen.
    fn see<T>(&self, (result, seen): (T, u64)) -> T {
        // A larger position is that of a later error, which another call has reported meanwhile.
        self.seen.fetch_max(seen, Ordering::Relaxed);
        result
    }

    /// [`get_mut`](Self::get_mut) for tasks. The guard may move to other threads.
    ///
    /// ```
    /// use bufcache::{Cache, MemoryDevice};
    /// # use testkit::block_on;
    ///
    /// let disk = Cache::new(1 << 20)?.attach(MemoryDevice::new(vec![0; 100_000]))?;
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
    /// A guard of the thread that polls the task does not belong to the task, which waits for its drop.
    /// Fails with [`GetError::Busy`] also if the tasks that are queued before this one keep the block for
    /// longer than the patience altogether, or if threads, which overtake tasks, lock it again and again.
    pub async fn get_mut_async(&self, block: u64) -> Result<OwnedWriteGuard, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        self.lock_async(key, Fill::Read).await
    }

    /// [`create`](Self::create) for tasks. If the future is dropped after its first poll, the block
    /// may be dirty and zeros.
    pub async fn create_async(&self, block: u64) -> Result<OwnedWriteGuard, GetError> {
        let key = self.checked_key(block)?;
        self.shared.counters.get.add(1);
        self.lock_async(key, Fill::Caller).await
    }

    /// Locks a block for writing. The caller has counted the get.
    async fn lock_async(&self, key: Key, fill: Fill) -> Result<OwnedWriteGuard, GetError> {
        let locked = self.shared.lock_write(&self.source, key, fill).await?;
        Ok(OwnedWriteGuard::new(self.clone(), None, locked.into_frame(), fill))
    }

    /// [`flush`](Self::flush) for tasks.
    pub async fn flush_async(&self) -> Result<(), WriteError> {
        let source = Arc::clone(&self.source);
        let result = run(async move { source.cache.flush(&source, 0..u64::MAX).await }).await;
        self.or_earlier(result)
    }

    /// [`flush_range`](Self::flush_range) for tasks.
    pub async fn flush_range_async(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        let source = Arc::clone(&self.source);
        run(async move { source.cache.flush(&source, blocks).await }).await
    }

    /// [`sync`](Self::sync) for tasks.
    pub async fn sync_async(&self) -> Result<(), WriteError> {
        let source = Arc::clone(&self.source);
        let result = run(async move { source.cache.sync(&source).await }).await;
        self.or_earlier(result)
    }

    /// [`write_through`](Self::write_through) for tasks.
    pub async fn write_through_async(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        let source = Arc::clone(&self.source);
        let write = async move { source.cache.write_through(&source, blocks).await };
        let result = run(write).await;
        self.or_earlier(result)
    }

    /// [`discard`](Self::discard) for tasks.
    pub async fn discard_async(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.overwrite_async(blocks, Overwrite::Discard).await
    }

    /// [`zero`](Self::zero) for tasks.
    pub async fn zero_async(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        self.overwrite_async(blocks, Overwrite::Zero).await
    }

    async fn overwrite_async(
        &self,
        blocks: Range<u64>,
        how: Overwrite<'static>,
    ) -> Result<(), WriteError> {
        self.check_range(&blocks)?;
        let source = Arc::clone(&self.source);
        run(async move { source.cache.overwrite(&source, blocks, how).await }).await
    }

    /// [`close`](Self::close) for tasks. The close goes on if the future is dropped.
    pub async fn close_async(&self) -> Result<(), WriteError> {
        let device = self.same_seen();
        let close = async move { (device.try_close().await, device.seen.load(Ordering::Relaxed)) };
        self.see(run(close).await)
    }
}
