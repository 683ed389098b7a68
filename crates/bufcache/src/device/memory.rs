//! A device in memory.

use std::io;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::BlockDevice;

/// A device whose bytes are in memory, for tests and small data.
#[derive(Debug)]
pub struct MemoryDevice {
    bytes: RwLock<Vec<u8>>,
}

impl MemoryDevice {
    /// Returns a device with these bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: RwLock::new(bytes) }
    }

    /// Returns the bytes of the device.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn bytes(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn bytes_mut(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Calls `change` with the bytes of a range.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if the range ends beyond the end of the device.
    fn change(&self, offset: u64, len: u64, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
        let mut bytes = self.bytes_mut();
        let from = usize::try_from(offset).ok();
        let end = offset.checked_add(len).and_then(|end| usize::try_from(end).ok());
        let part = from.zip(end).and_then(|(from, end)| bytes.get_mut(from..end));
        part.map(change).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))
    }
}

impl BlockDevice for MemoryDevice {
    fn len(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let bytes = self.bytes();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let count = buf.len().min(bytes.len() - from);
        buf[..count].copy_from_slice(&bytes[from..from + count]);
        Ok(count)
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.change(offset, buf.len() as u64, |part| part.copy_from_slice(buf))
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.change(offset, len, |part| part.fill(0))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.zero(offset, len)
    }

    /// Does nothing: the bytes live as long as the device.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
