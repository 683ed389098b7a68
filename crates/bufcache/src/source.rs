//! An attached device, as the cache sees it.

use std::ops::{Deref, Range};
use std::{fmt, io};

use offlock_sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use offlock_sync::{Arc, fence, order};

use crate::cache::Shared;
use crate::device::BlockDevice;
use crate::dirty::{Writes, errno_of};
use crate::engine::refuses_wait;
use crate::error::{Failure, GetError};
use crate::ids::Identity;
use crate::word::Key;

/// An attached device. Lives as long as its handles, guards, operations and dirty buffers.
pub(crate) struct Source {
    /// The cache that the device is attached to.
    pub(crate) cache: Arc<Shared>,
    pub(crate) device: std::sync::Arc<dyn BlockDevice>,
    /// The identity that the device reported when it was attached.
    pub(crate) identity: Option<Identity>,
    pub(crate) in_flight: InFlight,
    /// The number of changes of the device (writes, discards, syncs) in engines of threads.
    pub(crate) in_engines: AtomicUsize,
    pub(crate) id: u16,
    /// The binary logarithm of the block size.
    pub(crate) shift: u32,
    pub(crate) blocks: u64,
    /// The length of the device in bytes when it was attached, or the most there may be if it may
    /// grow. A device that became smaller refuses writes beyond its end.
    pub(crate) len: u64,
    pub(crate) is_read_only: bool,
    /// The write depth that the device returned when it was attached.
    pub(crate) write_depth: usize,
    pub(crate) writes: Writes,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, shift, .. } = self;
        write!(f, "{blocks} blocks of {} bytes", 1 << shift)
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.cache.write_back.remove_device(self);
        self.cache.lookup.ids.lock().retire(self.id);
    }
}

/// The binary logarithm of the size of a sector.
const SECTOR: u32 = 9;

impl Source {
    /// Returns the key of a block. `None` if it is beyond the end of the device.
    #[inline(always)]
    pub(crate) fn key(&self, block: u64) -> Option<Key> {
        (block < self.blocks).then(|| Key::new(self.id, block << (self.shift - SECTOR)))
    }

    /// Returns the number of the block with that key.
    pub(crate) fn block(&self, key: Key) -> u64 {
        debug_assert!(key.device() == self.id);
        key.sector() >> (self.shift - SECTOR)
    }

    /// Returns the number of sectors of a block.
    pub(crate) fn sectors_of_block(&self) -> u64 {
        1 << (self.shift - SECTOR)
    }

    /// Returns the sectors of a block.
    pub(crate) fn sectors(&self, key: Key) -> Range<u64> {
        key.sector()..key.sector() + self.sectors_of_block()
    }

    /// Returns the sectors of a range of blocks, cut at the end of the device.
    pub(crate) fn sectors_of(&self, blocks: Range<u64>) -> Range<u64> {
        let shift = self.shift - SECTOR;
        blocks.start.min(self.blocks) << shift..blocks.end.min(self.blocks) << shift
    }

    /// Returns an error if the block must not be read from the device: the device is closed, or may
    /// have lost a write of the block.
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

    /// Refuses operations from now on. The device may be attached again once none is in flight.
    pub(crate) fn detach(&self) {
        if self.in_flight.refuse() {
            self.detach_now();
        }
    }

    pub(crate) fn detach_now(&self) {
        if let Some(identity) = self.identity {
            self.cache.lookup.ids.lock().detach(identity);
        }
    }

    /// Returns an error if the device takes no writes.
    pub(crate) fn check_write(&self) -> Result<(), GetError> {
        match self.writes.poisoned() {
            _ if self.is_read_only => Err(GetError::ReadOnly),
            _ if self.writes.refuses_writers() => Err(GetError::Closed),
            Some(errno) => Err(GetError::Poisoned { errno }),
            None => Ok(()),
        }
    }

    /// Returns whether the calling thread may block for changes of the device. False if one is in an
    /// engine and may wait for this thread; see [`engine`](crate::engine).
    pub(crate) fn may_wait(&self) -> bool {
        // Ordering: Relaxed; the fence in `refuses_wait` orders it.
        let refused = refuses_wait(|| self.in_engines.load(Ordering::Relaxed) > 0);
        !refused
    }

    /// Returns the offset of the block on the device in bytes.
    pub(crate) fn offset(key: Key) -> u64 {
        key.sector() << SECTOR
    }

    /// Checks the result of a read, zeroes the bytes beyond the end of the device, and calls the
    /// verifier.
    pub(crate) fn accept(
        &self,
        key: Key,
        bytes: &mut [u8],
        result: io::Result<usize>,
    ) -> Result<(), Failure> {
        let offset = Self::offset(key);
        let count = match result {
            Ok(count) => count.min(bytes.len()),
            Err(error) => return Err(Failure(errno_of(&error))),
        };
        // Only the device's own end may be inside a block. The device may be a part of a file that
        // goes on behind it.
        let there = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        if count < there {
            return Err(Failure::SHORT);
        }
        bytes[there..].fill(0);
        match &self.writes.options.verify {
            Some(verify) if !verify(self.block(key), bytes) => Err(Failure::VERIFY),
            _ => Ok(()),
        }
    }
}

/// An operation of a device, which stays attached until this drops.
#[derive(Debug)]
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

// The count of a device's operations in flight. A device that has ended is detached after the last
// one.

/// Set once the device has ended: no new operation begins.
const ENDED: u64 = 1 << 63;

/// The count of the operations of one device.
#[derive(Debug)]
pub(crate) struct InFlight {
    /// The count, and `ENDED`.
    state: AtomicU64,
    /// Set when the last handle is dropped: a block whose write fails is dropped then.
    abandoned: AtomicBool,
}

// Ordering: AcqRel where an operation or the device ends. Each pairs with the later ones, so that the
// last, whose thread detaches the device, comes after all that the operations did.
impl InFlight {
    pub(crate) fn new() -> Self {
        Self { state: AtomicU64::new(0), abandoned: AtomicBool::new(false) }
    }

    /// Counts one more operation, unless the device has ended. Lock-free.
    pub(crate) fn begin(&self) -> bool {
        let next = |seen| (seen & ENDED == 0).then_some(seen + 1);
        // Ordering: Relaxed, both; an operation that begins needs nothing of those before it, and the
        // exchange keeps their releases going.
        self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    /// Ends an operation. Returns whether it was the last one of a device that has ended.
    pub(crate) fn end(&self) -> bool {
        self.state.fetch_sub(1, order!(AcqRel, "end: the operations come before the detach"))
            == ENDED + 1
    }

    /// Refuses new operations. Returns `true` to the first caller if no operation is in flight.
    pub(crate) fn refuse(&self) -> bool {
        self.state.fetch_or(ENDED, order!(AcqRel, "refuse: the operations come before the detach"))
            == 0
    }

    /// Returns the number of operations in flight: a recent value.
    pub(crate) fn count(&self) -> usize {
        // Ordering: Relaxed; a measure.
        (self.state.load(Ordering::Relaxed) & !ENDED) as usize
    }

    /// Returns whether an operation is in flight.
    pub(crate) fn any(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `end`; it carries what the operations did.
        self.state.load(order!(Acquire, "any: the operations come before the detach")) & !ENDED != 0
    }

    /// Notes that the last handle is dropped. The caller looks for marked blocks next.
    pub(crate) fn abandon(&self) {
        // Ordering: Relaxed; the fence orders it.
        self.abandoned.store(true, Ordering::Relaxed);
        // Ordering: SeqCst, against the fence in `is_abandoned`:
        // - ours first: a write that fails finds the device abandoned, and drops its block;
        // - theirs first: the block is not marked any more, and is dropped by the caller.
        fence!(SeqCst, "abandon: the device is abandoned before the look at the marks");
    }

    /// Returns whether the last handle is dropped. A caller has taken its mark off the block before.
    pub(crate) fn is_abandoned(&self) -> bool {
        // Ordering: SeqCst, against the fence in `abandon`; see there.
        fence!(SeqCst, "is_abandoned: the mark is taken off before");
        // Ordering: Relaxed; the fence orders it.
        self.abandoned.load(Ordering::Relaxed)
    }
}
