//! What a device is attached with: who looks at blocks, what goes before them, and when to give up.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use super::WriteError;

/// Looks at the bytes of a block.
pub(crate) type Look = Box<dyn Fn(u64, &[u8]) -> bool + Send + Sync>;

/// A log that has to be on its device before the blocks it speaks of.
///
/// Called with no lock of the cache held; it must not write blocks of a device that is attached with it.
pub trait Wal: Send + Sync + 'static {
    /// The log is durable up to, and with, this number. It must not wait: blocks that are about to be given
    /// to the device are marked meanwhile, and whoever wants to write them waits.
    fn durable(&self) -> u64;

    /// Makes the log durable up to a number. No block is marked meanwhile.
    ///
    /// # Errors
    ///
    /// The log's: blocks that need it stay dirty.
    fn flush(&self, number: u64) -> io::Result<()>;
}

/// How long the cleaner tries a block again that the device refuses. [Flushes](crate::Device::flush) and
/// syncs try each block once, whatever this says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorRule {
    /// Most tries after the first.
    pub retries: u32,
    /// None begins so long after the block became dirty.
    pub within: Duration,
}

impl ErrorRule {
    /// Tries for ever.
    pub const FOREVER: Self = Self { retries: u32::MAX, within: Duration::MAX };
    /// Tries once.
    pub const NEVER: Self = Self { retries: 0, within: Duration::ZERO };
}

/// How a device is attached; see [`Cache::attach_with`](crate::Cache::attach_with).
#[must_use]
pub struct AttachOptions {
    pub(crate) block_size: usize,
    pub(crate) verify: Option<Look>,
    pub(crate) before_write: Option<Look>,
    pub(crate) wal: Option<Arc<dyn Wal>>,
    rules: Vec<(i32, ErrorRule)>,
    otherwise: ErrorRule,
    on_loss: Option<Box<dyn Fn(WriteError) + Send + Sync>>,
}

impl AttachOptions {
    /// In blocks of `block_size` bytes; nobody looks at them, and the cleaner tries a block that is refused
    /// for ever, except where the device is gone (`ENODEV`, `ENXIO`).
    pub fn new(block_size: usize) -> Self {
        let gone = [libc::ENODEV, libc::ENXIO].map(|errno| (errno, ErrorRule::NEVER));
        Self {
            block_size,
            verify: None,
            before_write: None,
            wal: None,
            rules: gone.into(),
            otherwise: ErrorRule::FOREVER,
            on_loss: None,
        }
    }

    /// What this returns false for, of what was read, is cached for nobody. It is given the number of the
    /// block and its bytes.
    pub fn verify(mut self, verify: impl Fn(u64, &[u8]) -> bool + Send + Sync + 'static) -> Self {
        self.verify = Some(Box::new(verify));
        self
    }

    /// What this returns false for is not written, and stays dirty. It looks at blocks that others read
    /// meanwhile: a checksum is put in under the write guard.
    pub fn before_write(
        mut self,
        look: impl Fn(u64, &[u8]) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.before_write = Some(Box::new(look));
        self
    }

    /// The log that goes before blocks with a [number](crate::WriteGuard::set_lsn).
    pub fn wal(mut self, wal: Arc<dyn Wal>) -> Self {
        self.wal = Some(wal);
        self
    }

    /// How long the cleaner tries where the device says `errno`.
    pub fn on_error(mut self, errno: i32, rule: ErrorRule) -> Self {
        self.rules.retain(|(known, _)| *known != errno);
        self.rules.push((errno, rule));
        self
    }

    /// How long it tries where the device says anything else.
    pub fn on_other_errors(mut self, rule: ErrorRule) -> Self {
        self.otherwise = rule;
        self
    }

    /// Is told when the last handle of the device is dropped and what was written could not be made durable:
    /// blocks that are dirty still are lost then. Without this a line on the standard error says so.
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
                // `eprintln` panics where the standard error is closed.
                let _ = io::stderr().write_all(line.as_bytes());
            }
        }
    }

    pub(crate) fn rule(&self, errno: i32) -> ErrorRule {
        self.rules.iter().find(|(of, _)| *of == errno).map_or(self.otherwise, |(_, rule)| *rule)
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
