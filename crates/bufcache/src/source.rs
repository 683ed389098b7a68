//! An attached device, as the cache sees it.

use std::io;
use std::ops::{Deref, Range};

use percpu::sync::Arc;

use crate::cache::Shared;
use crate::device::BlockDevice;
use crate::dirty::Writes;
use crate::error::{Failure, GetError};
use crate::ids::Identity;
use crate::in_flight::InFlight;
use crate::wait::Bell;
use crate::word::Key;

/// Lives as long as anybody who can put a block of the device into the table.
pub(crate) struct Source {
    /// Whose device it is.
    pub(crate) cache: Arc<Shared>,
    pub(crate) device: Box<dyn BlockDevice>,
    /// What the device said that it is when it was attached.
    pub(crate) identity: Option<Identity>,
    pub(crate) in_flight: InFlight,
    /// Wakes the threads that wait for its operations.
    pub(crate) bell: std::sync::Arc<Bell>,
    pub(crate) id: u16,
    /// Log of the block size.
    pub(crate) shift: u32,
    pub(crate) blocks: u64,
    /// Bytes of the device when it was attached. One that becomes smaller refuses writes behind its end; what
    /// the cache gives it does not depend on that.
    pub(crate) len: u64,
    pub(crate) is_read_only: bool,
    pub(crate) writes: Writes,
}

impl Drop for Source {
    fn drop(&mut self) {
        self.cache.remove_device(self);
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

    /// Bytes of the device.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The sectors of a block.
    pub(crate) fn sectors(&self, key: Key) -> Range<u64> {
        key.sector()..key.sector() + (1 << (self.shift - SECTOR))
    }

    /// Those of a range of blocks that the device has.
    pub(crate) fn sectors_of(&self, blocks: Range<u64>) -> Range<u64> {
        let shift = self.shift - SECTOR;
        blocks.start.min(self.blocks) << shift..blocks.end.min(self.blocks) << shift
    }

    /// What a get may not be answered with, as the device may have lost it.
    pub(crate) fn check_read(&self, key: Key) -> Result<(), GetError> {
        if self.writes.is_closed() {
            return Err(GetError::Closed);
        }
        match self.writes.poisoned() {
            Some(errno) if self.writes.is_lost(&self.sectors(key)) => {
                Err(GetError::Poisoned { errno })
            }
            _ => Ok(()),
        }
    }

    /// The device is about to be read for a block that was just inserted.
    pub(crate) fn note_load(&self, key: Key) {
        self.writes.note_load(&self.sectors(key));
    }

    /// Refuses operations from now on. The device may be attached again once none is in flight.
    pub(crate) fn detach(&self) {
        if self.in_flight.refuse() {
            self.detach_now();
        }
    }

    pub(crate) fn detach_now(&self) {
        if let Some(identity) = self.identity {
            self.cache.detach(identity);
        }
    }

    /// Whether anything may be written.
    pub(crate) fn check_write(&self) -> Result<(), GetError> {
        match self.writes.poisoned() {
            _ if self.is_read_only => Err(GetError::ReadOnly),
            _ if self.writes.refuses_writers() => Err(GetError::Closed),
            Some(errno) => Err(GetError::Poisoned { errno }),
            None => Ok(()),
        }
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
            let there = self.len.saturating_sub(offset);
            if (count as u64) < there {
                return Err(Failure::Short);
            }
            bytes[count..].fill(0);
        }
        match &self.writes.options.verify {
            Some(verify) if !verify(self.block(key), bytes) => Err(Failure::Verify),
            _ => Ok(()),
        }
    }
}

/// An operation of a device, which stays attached until this drops.
#[must_use = "the operation counts while this lives"]
pub(crate) struct Operation<S: Deref<Target = Source>>(S);

impl<S: Deref<Target = Source>> Operation<S> {
    /// Begins an operation. Returns `None` if the device has ended.
    pub(crate) fn begin(source: S) -> Option<Self> {
        source.in_flight.begin().then(|| Self(source))
    }
}

impl<S: Deref<Target = Source>> Deref for Operation<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.0
    }
}

impl<S: Deref<Target = Source>> Drop for Operation<S> {
    fn drop(&mut self) {
        if self.0.in_flight.end() {
            self.0.detach_now();
        }
    }
}
