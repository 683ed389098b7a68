//! An attached device, as the cache sees it.

use std::io;

use percpu::sync::Arc;

use crate::cache::Shared;
use crate::device::BlockDevice;
use crate::error::Failure;
use crate::word::Key;

/// Looks at what was read, before anybody else does.
pub(crate) type Verify = Box<dyn Fn(u64, &[u8]) -> bool + Send + Sync>;

/// Lives as long as anybody who can put a block of the device into the table.
pub(crate) struct Source {
    /// Whose device it is.
    pub(crate) cache: Arc<Shared>,
    pub(crate) device: Box<dyn BlockDevice>,
    pub(crate) id: u16,
    /// Log of the block size.
    pub(crate) shift: u32,
    pub(crate) blocks: u64,
    pub(crate) verify: Option<Verify>,
}

impl Drop for Source {
    fn drop(&mut self) {
        self.cache.retire_id(self.id);
    }
}

/// Log of a sector's bytes.
const SECTOR: u32 = 9;

impl Source {
    /// The key of a block that the device has.
    #[inline(always)]
    pub(crate) fn key(&self, block: u64) -> Option<Key> {
        (block < self.blocks).then(|| Key::new(self.id, block << (self.shift - SECTOR)))
    }

    /// Whose key it is.
    pub(crate) fn block(&self, key: Key) -> u64 {
        debug_assert!(key.device() == self.id);
        key.sector() >> (self.shift - SECTOR)
    }

    /// Where the block begins on the device, in bytes.
    pub(crate) fn offset(key: Key) -> u64 {
        key.sector() << SECTOR
    }

    /// Reads a block and verifies it. The bytes behind the end of the device are zeroed.
    pub(crate) fn read(&self, key: Key, bytes: &mut [u8]) -> Result<(), Failure> {
        let result = loop {
            match self.device.read(Self::offset(key), bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        self.accept(key, bytes, result)
    }

    /// Looks at what a read of the device has brought.
    pub(crate) fn accept(
        &self,
        key: Key,
        bytes: &mut [u8],
        result: io::Result<usize>,
    ) -> Result<(), Failure> {
        let offset = Self::offset(key);
        let count = match result {
            Ok(count) => count.min(bytes.len()),
            Err(error) => return Err(Failure::Errno(error.raw_os_error().unwrap_or(libc::EIO))),
        };
        if count < bytes.len() {
            // Only the device's own end may be inside a block.
            let there = self.device.len().saturating_sub(offset);
            if (count as u64) < there {
                return Err(Failure::Short);
            }
            bytes[count..].fill(0);
        }
        match &self.verify {
            Some(verify) if !verify(self.block(key), bytes) => Err(Failure::Verify),
            _ => Ok(()),
        }
    }
}
