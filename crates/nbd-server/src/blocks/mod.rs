//! The images, and the cache of their blocks.
//!
//! ```text
//!  READ ─► all blocks cached? ─yes─► copied to the reply's buffer, without a future
//!             └─no─► a future of the worker reads the image, and keeps the blocks of a short READ
//!  WRITE ─► each block cached, or a buffer free? ─yes─► copied to the cache, dirty ─► reply
//!             └─no─► a future waits for buffers; a long WRITE bypasses the cache
//! ```
//!
//! All changes pass through the cache, even those that bypass its buffers: they exclude other
//! changes of their blocks. So an answered change is on the image, or dirty in the cache; see
//! the module `commands`.
//!
//! A READ that fills the cache claims its blocks before it reads them, and a WRITE of a claimed
//! block waits for the READ. A block cannot be claimed if it is cached, if another READ is reading
//! it, or if no buffer is free. The READ then returns it without keeping it, so no READ waits for
//! another one or fails with it. While few READs hit, the cache also refuses the first claim of a
//! block: the READ bypasses the cache.
//!
//! A failed sync poisons the image until the server ends: writes, trims and flushes fail with EIO.
//! A read returns blocks that are cached, and blocks of the image that were not written since the
//! last successful sync. Other blocks may be lost, and their reads fail with EIO. A block that
//! cannot be written back stays dirty and readable, and is written again later.
//!
//! A panic marks the image as failed: its changes and FLUSHes fail with EIO, and the server ends with
//! an exit code that says so.
//!
//! With `--cache 0` the engine reads and writes the image, so the cache does not know which blocks
//! were written. After a failed sync, READs and WRITEs continue, and READs may return bytes that a
//! crash would lose. FLUSH, FUA, TRIM and ZEROES fail with EIO.

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aio_reap::{AlignedBuf, Engine};
use bufcache::{
    AttachOptions, BlockDevice, Cache, CacheStats, Device, FileDevice, GetError, Load, WriteError,
};
use offlock_sync::Mutex;
use tracing::error;

use crate::admission::SMALL;
use crate::memory::LARGEST;
#[cfg(feature = "objects")]
use crate::volume::Volume;
use crate::waits;

/// Bytes of a block: the smallest read of most clients' file systems.
pub(crate) const BLOCK: usize = 4096;
/// The bytes of an image that the cache can number. A longer file is served up to there.
pub(crate) const NUMBERED: u64 = 1 << 57;
/// A request may fill at most one of this many parts of the cache, so that one client does not
/// evict all blocks of others.
const SHARE: u64 = 8;
/// A READ of at least this many bytes that begins where another READ ended belongs to a scan, whose
/// blocks are mostly read once. Keeping 16 blocks took as much time as a READ of 64 KiB itself.
/// Longer WRITEs bypass the cache for the same reason.
const SCAN: usize = 4 * BLOCK;
/// The percentage of dirty blocks above which the cache writes them back without delay. A FLUSH waits for the
/// blocks that write-back has left. Measured with the default cache and the demo's mix: from 10 % on, a FLUSH
/// found 590 dirty blocks, and took 1.7 times as long.
const WRITE_BACK_ABOVE: u32 = 1;
/// The percentage of dirty blocks above which a WRITE waits for write-back.
const WRITES_WAIT_ABOVE: u32 = 75;

/// The cache of all images.
#[derive(Debug)]
pub(crate) struct Blocks {
    cache: Cache,
    /// See [`Image::longest`].
    longest: u64,
    /// The names of the images that have failed, also of images that were let go since.
    failed: Arc<Mutex<Vec<String>>>,
}

/// The bytes of an image.
pub(crate) struct Backing {
    /// The device below the cache, with at most [`NUMBERED`] bytes.
    pub(crate) device: Arc<dyn BlockDevice>,
    pub(crate) source: Source<File>,
    /// Bytes of the image.
    pub(crate) len: u64,
    /// The kernel's page cache may have blocks of the source.
    pub(crate) is_buffered: bool,
}

/// What reads and writes an image when the cache is bypassed.
#[derive(Clone)]
pub(crate) enum Source<F> {
    /// A file, which the workers' engines read and write.
    File(F),
    /// A volume on an object store.
    #[cfg(feature = "objects")]
    Volume(Arc<Volume>),
    /// A test's device, written on a thread of the cache. An engine reads its file.
    #[cfg(test)]
    Device(Arc<dyn BlockDevice>, F),
}

impl Source<File> {
    /// Returns the same source for tasks of an engine.
    pub(crate) fn attach(&self, engine: &Engine) -> io::Result<Source<aio_reap::File>> {
        let attach = |file: &File| engine.attach(file.try_clone()?);
        Ok(match self {
            Self::File(file) => Source::File(attach(file)?),
            #[cfg(feature = "objects")]
            Self::Volume(volume) => Source::Volume(Arc::clone(volume)),
            #[cfg(test)]
            Self::Device(device, file) => Source::Device(Arc::clone(device), attach(file)?),
        })
    }
}

impl Backing {
    /// Opens a file with its present size.
    pub(crate) fn open(file: &File) -> io::Result<Self> {
        let device = FileDevice::new(file.try_clone()?)?;
        // O_DIRECT writes whole units only: leave out a part of a unit, as exports do.
        let len = device.len() / device.alignment() as u64 * device.alignment() as u64;
        let is_buffered = device.alignment() == 1;
        let device = Arc::new(device.up_to(len.min(NUMBERED)));
        Ok(Self { device, source: Source::File(file.try_clone()?), len, is_buffered })
    }
}

#[cfg(feature = "objects")]
impl From<Volume> for Backing {
    fn from(volume: Volume) -> Self {
        let (len, volume) = (volume.len(), Arc::new(volume));
        Self {
            device: Arc::clone(&volume) as _,
            source: Source::Volume(volume),
            len,
            is_buffered: false,
        }
    }
}

/// An image, its cached blocks, and what its requests share.
pub(crate) struct Image {
    pub(crate) name: String,
    pub(crate) device: Device,
    pub(crate) is_read_only: bool,
    pub(crate) source: Source<File>,
    /// The unit of offsets and lengths of reads and writes, in bytes.
    pub(crate) alignment: usize,
    /// See [`Backing::is_buffered`].
    pub(crate) is_buffered: bool,
    /// Bytes of the image. Ordering: Relaxed, all: the length only grows, and a request learns of
    /// the new length from its session, which its worker made after a load of this word.
    len: AtomicU64,
    /// Longest READ that is kept, and the limit of kept WRITEs unless [`SCAN`] is less. Blocks of
    /// longer requests are mostly used once, and the device's time per byte outweighs its time per
    /// request. 0: nothing is kept.
    longest: u64,
    /// The end of the last READ that missed the cache.
    next: AtomicU64,
    /// A request of the image panicked. Ordering: Relaxed, all. The store precedes the reply with the
    /// error, and a client that has this reply reaches another worker through the kernel, which orders
    /// the worker's load after the store.
    has_failed: AtomicBool,
    /// See [`Blocks::failed`].
    failed: Arc<Mutex<Vec<String>>>,
}

impl Blocks {
    /// Makes a cache of `bytes` bytes; 0 disables it.
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        let capacity = usize::try_from(bytes).unwrap_or(usize::MAX);
        // Syncs and exclusion need the cache even if it keeps no blocks.
        let capacity = if bytes == 0 { BLOCK } else { capacity };
        let cache = Cache::builder(capacity).block_size(BLOCK).patience(waits::BUFFER);
        let cache = cache.dirty_limits(WRITE_BACK_ABOVE, WRITES_WAIT_ABOVE).build()?;
        let longest = if bytes == 0 { 0 } else { SMALL.min(bytes / SHARE).max(BLOCK as u64) };
        Ok(Self { cache, longest, failed: Arc::default() })
    }

    /// Makes an image. `name` identifies it in the log and in reports.
    pub(crate) fn attach(&self, name: String, backing: Backing) -> io::Result<Arc<Image>> {
        let Backing { device, source, len, is_buffered } = backing;
        let (alignment, is_read_only) = (device.alignment(), device.is_read_only());
        let options = AttachOptions::new().on_loss(|error| error!(%error, "blocks are lost"));
        let options = if matches!(source, Source::File(_)) { options.growing() } else { options };
        Ok(Arc::new(Image {
            name,
            device: self.cache.attach_with(device, options)?,
            is_read_only,
            source,
            alignment,
            is_buffered,
            len: AtomicU64::new(len.min(NUMBERED)),
            longest: self.longest,
            has_failed: AtomicBool::new(false),
            failed: Arc::clone(&self.failed),
            next: AtomicU64::new(u64::MAX),
        }))
    }

    /// Returns the names of the images that have failed.
    pub(crate) fn failed(&self) -> Vec<String> {
        self.failed.lock().clone()
    }

    /// Returns the cache's statistics, if it keeps blocks.
    pub(crate) fn stats(&self) -> Option<CacheStats> {
        (self.longest > 0).then(|| self.cache.stats())
    }
}

/// A part of a request within one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) block: u64,
    /// The offset within the block.
    pub(crate) from: usize,
    pub(crate) count: usize,
    /// The part covers every byte of the block that the image has.
    pub(crate) whole: bool,
}

/// The bytes that a READ transfers from its image, and the requested ones among them: the only place
/// where a READ is widened to whole units, so that its limit and its reply fit the same range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadRange {
    /// The offset of the first transferred byte.
    pub(crate) start: u64,
    /// Transferred bytes, for which the buffer has room.
    pub(crate) len: usize,
    /// Transferred bytes before the requested ones.
    pub(crate) head: usize,
    /// Requested bytes.
    pub(crate) wanted: usize,
}

impl ReadRange {
    /// Widens `wanted` bytes at `offset` to multiples of `unit`. `None` if these are more than
    /// `most` bytes, or end where a file cannot.
    pub(crate) fn new(offset: u64, wanted: u64, unit: u64, most: usize) -> Option<Self> {
        let end = offset.checked_add(wanted)?;
        let (start, end) = match wanted {
            0 => (offset, end),
            _ => (offset - offset % unit, end.checked_next_multiple_of(unit)?),
        };
        let len = usize::try_from(end - start).ok().filter(|&len| len <= most)?;
        // Both are at most `len`.
        let (head, wanted) = ((offset - start) as usize, wanted as usize);
        Some(Self { start, len, head, wanted })
    }
}

impl Image {
    /// Returns the length of the image in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Returns the file of the image, unless it is a volume.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.source {
            Source::File(file) => Some(file),
            #[cfg(feature = "objects")]
            Source::Volume(_) => None,
            #[cfg(test)]
            Source::Device(_, file) => Some(file),
        }
    }

    /// Grows the image to `len` bytes, the new length of its file, rounded down to whole blocks and to
    /// [`NUMBERED`] bytes. Returns false for an image that cannot grow, because it has no file or does
    /// not end with a whole block.
    pub(crate) fn grow(&self, len: u64) -> bool {
        let may = self.file().is_some() && self.len().is_multiple_of(BLOCK as u64);
        if may {
            let len = len.min(NUMBERED);
            self.len.fetch_max(len - len % BLOCK as u64, Ordering::Relaxed);
        }
        may
    }

    /// Returns whether the cache keeps nothing, so that each READ and WRITE goes to the image.
    pub(crate) fn is_bypassed(&self) -> bool {
        self.longest == 0
    }

    /// Returns whether a READ or WRITE is too long to be kept.
    pub(crate) fn bypasses_cache(&self, len: u64, write: bool) -> bool {
        len > if write { self.longest.min(SCAN as u64) } else { self.longest }
    }

    /// Returns the parts of a range, one per block.
    pub(crate) fn pieces(&self, offset: u64, len: usize) -> impl Iterator<Item = Piece> + use<> {
        let (image_end, end) = (self.len(), offset + len as u64);
        covering(offset, end).map(move |block| {
            let start = block * BLOCK as u64;
            let stop = (start + BLOCK as u64).min(image_end);
            let (from, till) = (start.max(offset), stop.min(end));
            Piece {
                block,
                from: (from - start) as usize,
                count: till.saturating_sub(from) as usize,
                whole: from == start && till == stop,
            }
        })
    }

    /// Returns the blocks that lie wholly within a range.
    pub(crate) fn inner(&self, offset: u64, end: u64) -> Range<u64> {
        let start = offset.div_ceil(BLOCK as u64);
        let stop = if end == self.len() { covering(0, end).end } else { end / BLOCK as u64 };
        start..stop.max(start)
    }

    /// Returns the blocks of a READ. `None` if the READ is empty, too long to be kept, or past the
    /// end.
    fn cacheable_blocks(&self, offset: u64, len: usize) -> Option<Range<u64>> {
        let end = offset.checked_add(len as u64)?;
        let kept = (1..=self.longest).contains(&(len as u64)) && end <= self.len();
        kept.then(|| covering(offset, end))
    }

    /// Returns what a READ transfers if it misses the cache. `None` if no buffer is large enough.
    pub(crate) fn read_range(&self, offset: u64, len: u64) -> Option<ReadRange> {
        let len_of_bytes = usize::try_from(len).ok()?;
        let unit = match self.cacheable_blocks(offset, len_of_bytes) {
            Some(_) => BLOCK,
            None if self.is_aligned(offset, len_of_bytes) => 1,
            None => BLOCK.max(self.alignment),
        };
        ReadRange::new(offset, len, unit as u64, LARGEST)
    }

    /// Returns whether the image can be read at exactly this range.
    fn is_aligned(&self, offset: u64, len: usize) -> bool {
        (offset | len as u64).is_multiple_of(self.alignment as u64)
    }

    /// Fills `bytes` if all of its blocks are cached.
    pub(crate) fn try_read(&self, offset: u64, bytes: &mut [u8]) -> bool {
        let Some(blocks) = self.cacheable_blocks(offset, bytes.len()) else { return false };
        let (mut from, mut done) = ((offset % BLOCK as u64) as usize, 0);
        for block in blocks {
            let Ok(guard) = self.device.try_get(block) else { return false };
            let count = (BLOCK - from).min(bytes.len() - done);
            bytes[done..][..count].copy_from_slice(&guard[from..][..count]);
            (from, done) = (0, done + count);
        }
        true
    }

    /// Writes to the cache without waiting. Returns the number of bytes written; the rest must
    /// wait.
    pub(crate) fn try_write(&self, offset: u64, bytes: &[u8]) -> Result<usize, GetError> {
        let mut done = 0;
        for Piece { block, from, count, whole } in self.pieces(offset, bytes.len()) {
            if count == 0 {
                break;
            }
            let got =
                if whole { self.device.try_create(block) } else { self.device.try_get_mut(block) };
            match got {
                Ok(mut guard) => {
                    guard[from..][..count].copy_from_slice(&bytes[done..][..count]);
                }
                Err(GetError::WouldBlock) => break,
                Err(error) => return Err(error),
            }
            done += count;
        }
        Ok(done)
    }

    /// Claims the missing blocks of a READ that are to be kept, and sets the length of its buffer to the
    /// bytes to transfer: those of whole units, or the requested bytes alone if no block was claimed
    /// and the image can be read there.
    pub(crate) fn fill(&self, offset: u64, buf: &mut AlignedBuf) -> Fill {
        let len = buf.len();
        let own = ReadRange { start: offset, len, head: 0, wanted: len };
        let is_kept = self.cacheable_blocks(offset, len).is_some() && {
            // Ordering: Relaxed; a hint.
            let follows = self.next.swap(offset + len as u64, Ordering::Relaxed) == offset;
            !(follows && len >= SCAN)
        };
        let whole = self.read_range(offset, len as u64);
        let whole = whole.filter(|range| range.len <= buf.capacity());
        let mut loads = Vec::new();
        if is_kept && let Some(range) = &whole {
            let blocks = covering(range.start, range.start + range.len as u64);
            let has_room = loads.try_reserve_exact((blocks.end - blocks.start) as usize).is_ok();
            for block in blocks.filter(|_| has_room) {
                match self.device.claim(block) {
                    Ok(claimed) => loads.extend(claimed),
                    Err(_) => break, // this and later blocks are not kept
                }
            }
        }
        let is_own = loads.is_empty() && self.is_aligned(offset, len);
        let range = whole.filter(|_| !is_own).unwrap_or(own);
        buf.set_len(range.len);
        Fill { range, loads }
    }

    /// Writes the dirty blocks of a range to the image, not necessarily to stable storage.
    pub(crate) async fn write_back(&self, bytes: Range<u64>) -> io::Result<()> {
        if self.is_bypassed() {
            return Ok(()); // none is dirty
        }
        let blocks = covering(bytes.start, bytes.end);
        self.device.flush_range_async(blocks).await.map_err(|error| self.write_error_to_io(error))
    }

    /// Marks the image as failed after a panic. Its changes and FLUSHes fail from now on, because
    /// what the panic interrupted is not known; the log, the metrics and the exit code tell of it.
    pub(crate) fn fail(&self) {
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            error!(
                export = self.name,
                "a panic: the image has failed, nothing changes it any more"
            );
            self.failed.lock().push(self.name.clone());
        }
    }

    /// Returns the error of a request whose get of a block failed.
    pub(crate) fn get_error_to_io(&self, error: GetError) -> io::Error {
        let is_poisoned = matches!(error, GetError::Poisoned { .. });
        self.error(error.errno(), is_poisoned, matches!(error, GetError::Panicked { .. }))
    }

    /// Returns the error of a request whose write, flush or sync failed.
    pub(crate) fn write_error_to_io(&self, error: WriteError) -> io::Error {
        let is_poisoned = matches!(error, WriteError::Poisoned { .. });
        self.error(error.errno(), is_poisoned, matches!(error, WriteError::Panicked { .. }))
    }

    /// A poisoned device is EIO whatever failed first: the client must see lost data. A panic of the
    /// device marks the image as failed.
    fn error(&self, errno: i32, is_poisoned: bool, has_panicked: bool) -> io::Error {
        if has_panicked {
            self.fail();
        }
        io::Error::from_raw_os_error(if is_poisoned { libc::EIO } else { errno })
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Makes everything written before durable. Blocks.
    pub(crate) fn sync_now(&self) -> io::Result<()> {
        let _fails = FailsOnPanic(self);
        if self.has_failed() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        loop {
            match ignore_earlier(self.device.sync()) {
                Err(WriteError::Busy { .. }) => {}
                result => return result.map_err(|error| self.write_error_to_io(error)),
            }
        }
    }
}

/// Marks an image as failed if it is dropped by a panic.
pub(crate) struct FailsOnPanic<'a>(pub(crate) &'a Image);

impl Drop for FailsOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail();
        }
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Ignores the error of an earlier write-back. The blocks of this call are on the device, otherwise
/// the call would have failed again.
pub(crate) fn ignore_earlier(result: Result<(), WriteError>) -> Result<(), WriteError> {
    match result {
        Err(WriteError::Earlier { .. }) => Ok(()),
        result => result,
    }
}

/// Returns the blocks that contain the bytes from `offset` to `end`.
pub(crate) fn covering(offset: u64, end: u64) -> Range<u64> {
    offset / BLOCK as u64..end.div_ceil(BLOCK as u64)
}

/// The bytes that a read or write of an image has transferred, and its result.
pub(crate) type Transferred = (usize, io::Result<()>);

/// The bytes that a READ transfers, and the claimed loads of the blocks to keep. Dropping it ends the
/// loads, whose blocks are not kept then.
#[derive(Debug)]
pub(crate) struct Fill {
    range: ReadRange,
    loads: Vec<Load>,
}

impl Fill {
    /// Returns the offset of the read.
    pub(crate) fn offset(&self) -> u64 {
        self.range.start
    }

    /// Passes the blocks that were read into `buf` to the cache, even if an error followed them, and
    /// moves the requested bytes to its front. Returns how many of these were read. An error beyond the
    /// requested bytes is ignored.
    pub(crate) fn finish(
        self,
        (count, result): Transferred,
        buf: &mut AlignedBuf,
    ) -> io::Result<usize> {
        let Self { range: ReadRange { start, head, wanted: len, .. }, loads } = self;
        // The number of bytes read from `at` on, of `wanted` bytes.
        let errno = result.err().map(|error| error.raw_os_error().unwrap_or(libc::EIO));
        let read = |at: usize, wanted: usize| match errno {
            Some(errno) if count < at + wanted => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(count.saturating_sub(at).min(wanted)),
        };
        for mut load in loads {
            let at = (load.offset() - start) as usize;
            let result = read(at, load.len());
            if let Ok(count) = result {
                load[..count].copy_from_slice(&buf[at..][..count]);
            }
            load.finish(result);
        }
        if head > 0 {
            buf.copy_within(head..head + len, 0);
        }
        buf.set_len(len);
        read(head, len)
    }
}
