//! What is cached: anything that has blocks.

mod file;
mod memory;

use std::io;

pub use self::file::FileDevice;
pub use self::memory::MemoryDevice;

/// Something with blocks, used by many threads at once.
///
/// Its methods are called with no lock of the cache held. They may block, and may panic: the block
/// then counts as not read.
pub trait BlockDevice: Send + Sync + 'static {
    /// How many bytes it has. Asked for when it is attached.
    fn len(&self) -> u64;

    /// Whether there is nothing in it.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads at `offset` and says how much: less than `buf` has only at the end of the device.
    ///
    /// `offset` and the length are multiples of the block size it was attached with, and `buf` is
    /// aligned to it.
    ///
    /// # Errors
    ///
    /// The device's. `Interrupted` is tried again.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
}

impl<D: BlockDevice + ?Sized> BlockDevice for std::sync::Arc<D> {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        (**self).read(offset, buf)
    }
}
