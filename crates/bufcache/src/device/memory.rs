//! A device in memory.

use std::io;
use std::sync::RwLock;

use super::BlockDevice;

/// Bytes in memory: for tests, and for what is small.
#[derive(Debug)]
pub struct MemoryDevice {
    bytes: RwLock<Vec<u8>>,
}

impl MemoryDevice {
    /// A device with these bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: RwLock::new(bytes) }
    }
}

impl BlockDevice for MemoryDevice {
    fn len(&self) -> u64 {
        self.bytes.read().unwrap_or_else(|poisoned| poisoned.into_inner()).len() as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let bytes = self.bytes.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let count = buf.len().min(bytes.len() - from);
        buf[..count].copy_from_slice(&bytes[from..from + count]);
        Ok(count)
    }
}
