//! The options of an attached device: its callbacks and its log.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::Arc;

use super::WriteError;

/// A callback that gets the number and the bytes of a block and accepts or refuses it.
pub(crate) type Look = Box<dyn Fn(u64, &[u8]) -> bool + Send + Sync>;

/// A write-ahead log, which must be durable before the blocks that it describes are written.
///
/// The cache calls it with no lock held. It must not write blocks of a device that is attached with
/// it.
pub trait Wal: Send + Sync + 'static {
    /// Returns the largest number up to which the log is durable. It must not wait, because the
    /// blocks that are about to be written are marked meanwhile, and writers of these blocks wait.
    fn durable(&self) -> u64;

    /// Makes the log durable up to a number. No block is marked meanwhile. Several threads may call
    /// this at once, and the log may be durable beyond the number already: then it returns at once.
    ///
    /// # Errors
    ///
    /// The error of the log. The blocks that need it stay dirty.
    fn flush(&self, number: u64) -> io::Result<()>;
}

/// How a device is attached; see [`Cache::attach_with`](crate::Cache::attach_with).
#[must_use = "options do nothing until a device is attached with them"]
pub struct AttachOptions {
    pub(crate) block_size: usize,
    pub(crate) grows: bool,
    pub(crate) verify: Option<Look>,
    pub(crate) before_write: Option<Look>,
    pub(crate) wal: Option<Arc<dyn Wal>>,
    on_loss: Option<Box<dyn Fn(WriteError) + Send + Sync>>,
}

impl AttachOptions {
    /// Returns the options for blocks of `block_size` bytes without callbacks. The cleaner retries
    /// a refused block for ever, except if the device is gone (`ENODEV`, `ENXIO`).
    pub fn new(block_size: usize) -> Self {
        Self {
            block_size,
            grows: false,
            verify: None,
            before_write: None,
            wal: None,
            on_loss: None,
        }
    }

    /// Allows the device to become longer while it is attached: a block behind its end can be asked for, and is read and
    /// written once the device has it. Until then a get of the block fails, as the device reads too little.
    ///
    /// The program knows the length: the cache accepts a block anywhere behind the end. A file becomes longer by its
    /// write; another device refuses it, and the block stays dirty.
    ///
    /// A block is written as a whole, so the device must grow by whole blocks. A device whose length is not a multiple of
    /// the block size when it is attached keeps that length.
    ///
    /// ```
    /// use bufcache::{AttachOptions, Cache, FileDevice};
    ///
    /// let file = tempfile::tempfile()?;
    /// file.set_len(4096)?;
    /// let device = FileDevice::new(file.try_clone()?)?;
    /// let disk = Cache::new(1 << 20)?.attach_with(device, AttachOptions::new(4096).growing())?;
    /// assert!(disk.get(1).is_err());
    /// file.set_len(3 * 4096)?;
    /// assert_eq!(disk.get(1)?[0], 0);
    /// disk.create(2)?.fill(7);
    /// disk.sync()?;
    /// assert_eq!(file.metadata()?.len(), 3 * 4096);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn growing(mut self) -> Self {
        self.grows = true;
        self
    }

    /// Sets a check of each block that is read, by its number and its bytes. A block for which
    /// `verify` returns false is not cached, and its gets fail with
    /// [`GetError::Verify`](crate::GetError::Verify).
    ///
    /// `verify` may [get](crate::Device::get) other blocks, but must not block for a future of the
    /// device: the threads that would end it may all be in `verify`.
    pub fn verify(mut self, verify: impl Fn(u64, &[u8]) -> bool + Send + Sync + 'static) -> Self {
        self.verify = Some(Box::new(verify));
        self
    }

    /// Sets a check of each block before it is written. A block for which `look` returns false is
    /// not written and stays dirty.
    ///
    /// Other threads may read the block meanwhile, so a checksum must be stored under the write
    /// guard. `look` runs inside a write-back, which may be that of a [close](crate::Device::close) or
    /// a [reset](crate::Device::reset): a call of either in `look` then waits for itself, without an
    /// end. A flush or sync in `look` fails with [`WriteError::Busy`](crate::WriteError::Busy).
    pub fn before_write(
        mut self,
        look: impl Fn(u64, &[u8]) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.before_write = Some(Box::new(look));
        self
    }

    /// Sets the log of blocks with a [log position](crate::WriteGuard::set_lsn), which panics
    /// without a log.
    pub fn wal(mut self, wal: Arc<dyn Wal>) -> Self {
        self.wal = Some(wal);
        self
    }

    /// Sets a callback for data loss: the last handle of the device is dropped, and its writes
    /// could not be made durable. Blocks that are still dirty are lost, except for those of a write
    /// that another thread has begun: after [`WriteError::Busy`] such a write goes on, unsynced.
    /// Without the callback, a line on standard error reports the loss.
    pub fn on_loss(mut self, tell: impl Fn(WriteError) + Send + Sync + 'static) -> Self {
        self.on_loss = Some(Box::new(tell));
        self
    }

    pub(crate) fn tell_loss(&self, error: WriteError) {
        match &self.on_loss {
            Some(tell) => tell(error),
            None => {
                let line =
                    format!("bufcache: a device was dropped, and blocks are lost: {error}\n");
                // Not `eprintln`, which panics if standard error is closed.
                let _ = io::stderr().write_all(line.as_bytes());
            }
        }
    }
}

impl fmt::Debug for AttachOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachOptions")
            .field("block_size", &self.block_size)
            .field("verify", &self.verify.is_some())
            .field("before_write", &self.before_write.is_some())
            .field("wal", &self.wal.is_some())
            .finish_non_exhaustive()
    }
}
