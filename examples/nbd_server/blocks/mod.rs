//! The images, and the blocks of them that are kept in memory.
//!
//! ```text
//!  READ ─► all there? ─yes─► copied to the reply's buffer: no future, no wait
//!             └─no─► a future of the worker reads the image, and keeps what it reads, if it is short
//!  WRITE ─► each block there, or a buffer free? ─yes─► copied to the cache, dirty ─► reply
//!             └─no─► a future waits for that; long ones go past the cache, to the image
//! ```
//!
//! All changes go by way of the cache, also those past it, which exclude others from their blocks, so what was answered
//! is on the image, or it is dirty here; see [`commands`](crate::commands).
//!
//! A read for the cache claims its blocks before it begins: a WRITE of one of them waits for the read. A block that
//! cannot be claimed, because it is there, or is read for another READ, or no buffer is free, is answered all the same,
//! and not kept: no READ waits for another's read, nor fails with it. While few READs find their blocks, the cache also
//! refuses the first claim of a block: the READ goes past the cache, to its own buffer.
//!
//! A sync that fails poisons the image for as long as the server lives: writes, trims and flushes get EIO from then on,
//! and reads what is in the cache, or on the image and was not written since the last good sync. The rest may be
//! lost: EIO, too. What cannot be written back stays dirty, can be read, and is tried again.
//!
//! With `--cache 0` the engine reads and writes the image, and the cache does not know what was written: after a failed
//! sync, READs and WRITEs go on, and READs may return bytes that are lost after a crash. FLUSH, FUA, TRIM and ZEROES get
//! EIO.

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aio_reap::{AlignedBuf, Engine, IoBuf, IoBufMut, RequestError};
use bufcache::{
    AttachOptions, BlockDevice, Cache, CacheStats, Device, EngineDevice, GetError, Load, WriteError,
};
use tracing::error;

use crate::admission::SMALL;
use crate::calls::Calls;
use crate::flushes::Flushes;
use crate::upstream::NbdDevice;

/// Bytes of a block: what most clients' file systems read at least.
pub(crate) const BLOCK: usize = 4096;
/// A request is kept up to this part of the cache, so that one client leaves something to others. A
/// guess.
const SHARE: u64 = 8;
/// A READ of so many bytes and more that begins where another ended is part of a scan, which is mostly read
/// once; to keep its 16 blocks took the server as much time as a READ of 64 KiB itself. Longer WRITEs go past
/// the cache for the same reason. A guess.
const SCAN: usize = 4 * BLOCK;
/// How long the cache waits for a buffer while none can be written back. A guess: a disk that is full says so at
/// once, and one that is slow may take seconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// The cache of all images.
#[derive(Debug)]
pub(crate) struct Blocks {
    cache: Cache,
    /// See [`Image::longest`].
    longest: u64,
}

/// What holds the bytes of an image.
pub(crate) struct Backing {
    /// What is below the cache.
    pub(crate) device: Arc<dyn BlockDevice>,
    pub(crate) source: Source<File>,
}

/// What reads and writes an image past the cache.
#[derive(Clone)]
pub(crate) enum Source<F> {
    /// A file, by the workers' engines.
    File(F),
    /// An export of another server.
    Upstream(Arc<NbdDevice>),
    /// The device of a test, by a thread of the cache. If there is a file, an engine reads that.
    #[cfg(test)]
    Device(Arc<dyn BlockDevice>, Option<F>),
}

impl Source<File> {
    /// The same for the tasks of an engine.
    pub(crate) fn attach(&self, engine: &Engine) -> io::Result<Source<aio_reap::File>> {
        let attach = |file: &File| engine.attach(file.try_clone()?);
        Ok(match self {
            Self::File(file) => Source::File(attach(file)?),
            Self::Upstream(upstream) => Source::Upstream(Arc::clone(upstream)),
            #[cfg(test)]
            Self::Device(device, file) => {
                Source::Device(Arc::clone(device), file.as_ref().map(attach).transpose()?)
            }
        })
    }
}

impl Backing {
    /// A file, as large as it is now.
    pub(crate) fn open(file: &File) -> io::Result<Self> {
        let device = EngineDevice::new(file.try_clone()?)?;
        // With O_DIRECT no part of a unit can be written; exports are rounded down as well.
        let len = device.len() / device.alignment() as u64 * device.alignment() as u64;
        let device = Arc::new(device.up_to(len));
        Ok(Self { device, source: Source::File(file.try_clone()?) })
    }

    /// An export of another server.
    pub(crate) fn upstream(device: Arc<NbdDevice>) -> Self {
        Self { device: Arc::clone(&device) as _, source: Source::Upstream(device) }
    }
}

/// An image, and what is kept of it.
pub(crate) struct Image {
    pub(crate) name: String,
    pub(crate) device: Device,
    pub(crate) source: Source<File>,
    /// What reads and writes of the image are multiples of, in bytes.
    pub(crate) alignment: usize,
    pub(crate) flushes: Flushes,
    pub(crate) calls: Calls,
    /// In bytes. Ordering: Relaxed, all: it only grows, and a request learns of the new length from its session, which
    /// its worker made after a load of the same word.
    len: AtomicU64,
    /// Longest READ that is kept, and WRITE unless that is [`SCAN`]. What is longer is mostly used once, and
    /// the device's time for the bytes counts for more than that for the request. 0: none is kept.
    longest: u64,
    /// Where the last READ ended that found something missing.
    next: AtomicU64,
    /// A bug, for a test to find.
    #[cfg(test)]
    planted: std::sync::OnceLock<&'static str>,
}

impl Blocks {
    /// A cache of so many bytes, 0 for none.
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        let capacity = usize::try_from(bytes).unwrap_or(usize::MAX);
        // The syncs, and what is excluded from what, are the cache's also where it has no blocks.
        let capacity = if bytes == 0 { BLOCK } else { capacity };
        let cache =
            Cache::builder(capacity).block_sizes(BLOCK, BLOCK).patience(PATIENCE).build()?;
        let longest = if bytes == 0 { 0 } else { SMALL.min(bytes / SHARE).max(BLOCK as u64) };
        Ok(Self { cache, longest })
    }

    /// Makes an image. `name` is what the log and the figures call it.
    pub(crate) fn attach(&self, name: String, backing: Backing) -> io::Result<Arc<Image>> {
        let Backing { device, source } = backing;
        let (len, alignment) = (device.len(), device.alignment());
        let options = AttachOptions::new(BLOCK).on_loss(|error| error!(%error, "blocks are lost"));
        let options = if matches!(source, Source::File(_)) { options.growing() } else { options };
        Ok(Arc::new(Image {
            name,
            device: self.cache.attach_with(device, options)?,
            source,
            alignment,
            len: AtomicU64::new(len),
            longest: self.longest,
            flushes: Flushes::default(),
            calls: Calls::default(),
            next: AtomicU64::new(u64::MAX),
            #[cfg(test)]
            planted: std::sync::OnceLock::new(),
        }))
    }

    /// What the cache has done, if it keeps anything.
    pub(crate) fn stats(&self) -> Option<CacheStats> {
        (self.longest > 0).then(|| self.cache.stats())
    }
}

/// A part of a request that lies in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) block: u64,
    /// In the block.
    pub(crate) from: usize,
    pub(crate) count: usize,
    /// Nothing of the block is left out that the image has.
    pub(crate) whole: bool,
}

impl Image {
    /// Bytes of the image.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// The file of the image, if it is one.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.source {
            Source::File(file) => Some(file),
            #[cfg(test)]
            Source::Device(_, file) => file.as_ref(),
            Source::Upstream(_) => None,
        }
    }

    /// Makes the image longer if its file has grown to `len` bytes, by whole blocks. Returns whether it could: an image
    /// that does not end with a whole block keeps its length.
    pub(crate) fn grow(&self, len: u64) -> bool {
        let may = self.file().is_some() && self.len().is_multiple_of(BLOCK as u64);
        if may {
            self.len.fetch_max(len - len % BLOCK as u64, Ordering::Relaxed);
        }
        may
    }

    /// Whether nothing is kept: each READ and WRITE goes to the image.
    pub(crate) fn is_bypassed(&self) -> bool {
        self.longest == 0
    }

    /// Whether a READ or WRITE is too long to be kept.
    pub(crate) fn passes_by(&self, len: u64, write: bool) -> bool {
        len > if write { self.longest.min(SCAN as u64) } else { self.longest }
    }

    /// The parts of a range, block by block.
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

    /// The blocks that lie in a range as a whole.
    pub(crate) fn inner(&self, offset: u64, end: u64) -> Range<u64> {
        let start = offset.div_ceil(BLOCK as u64);
        let stop = if end == self.len() { covering(0, end).end } else { end / BLOCK as u64 };
        start..stop.max(start)
    }

    /// The blocks that a READ's bytes lie in; unless these are none or too many.
    fn find(&self, offset: u64, len: usize) -> Option<Range<u64>> {
        let end = offset.checked_add(len as u64)?;
        let kept = (1..=self.longest).contains(&(len as u64)) && end <= self.len();
        kept.then(|| covering(offset, end))
    }

    /// How large the buffer of a READ has to be.
    pub(crate) fn room(&self, offset: u64, len: usize) -> usize {
        match self.find(offset, len) {
            Some(blocks) => bytes_of(&blocks),
            None if self.is_aligned(offset, len) => len,
            None => bytes_of(&covering(offset, offset.saturating_add(len as u64))),
        }
    }

    /// Whether the image can be asked for just these bytes.
    fn is_aligned(&self, offset: u64, len: usize) -> bool {
        (offset | len as u64).is_multiple_of(self.alignment as u64)
    }

    /// Fills `bytes`, if all of them are there.
    pub(crate) fn try_read(&self, offset: u64, bytes: &mut [u8]) -> bool {
        let Some(blocks) = self.find(offset, bytes.len()) else { return false };
        let (mut from, mut done) = ((offset % BLOCK as u64) as usize, 0);
        for block in blocks {
            let Ok(guard) = self.device.try_get(block) else { return false };
            let count = (BLOCK - from).min(bytes.len() - done);
            bytes[done..][..count].copy_from_slice(&guard[from..][..count]);
            (from, done) = (0, done + count);
        }
        true
    }

    /// Writes to the cache without a wait. Returns how many bytes; the rest has to wait.
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

    /// Makes of a READ's buffer one for the whole blocks, and claims those that are not there and are
    /// to be kept. The buffer comes back if none is and the image can be asked for the READ's own bytes.
    pub(crate) fn fill(&self, offset: u64, mut buf: AlignedBuf) -> Result<Fill, AlignedBuf> {
        let len = buf.len();
        let is_aligned = self.is_aligned(offset, len);
        let short = self.find(offset, len);
        let is_kept = short.is_some() && {
            // Ordering: Relaxed; a hint.
            let follows = self.next.swap(offset + len as u64, Ordering::Relaxed) == offset;
            !(follows && len >= SCAN)
        };
        let blocks = short.unwrap_or_else(|| covering(offset, offset + len as u64));
        let whole = bytes_of(&blocks);
        if buf.capacity() < whole || (is_aligned && !is_kept) {
            return Err(buf);
        }
        buf.set_len(whole);
        let start = blocks.start * BLOCK as u64;
        let mut loads = Vec::new();
        let has_room = loads.try_reserve_exact((blocks.end - blocks.start) as usize).is_ok();
        for block in blocks.filter(|_| is_kept && has_room) {
            match self.device.claim(block) {
                Ok(claimed) => loads.extend(claimed),
                Err(_) => break, // it is not kept
            }
        }
        if loads.is_empty() && is_aligned {
            buf.set_len(len);
            return Err(buf);
        }
        Ok(Fill { buf, start, head: (offset - start) as usize, len, loads })
    }

    /// Gives the image what is dirty of a range of bytes. It need not be durable then. Blocks.
    pub(crate) fn settle(&self, bytes: Range<u64>) -> io::Result<()> {
        let blocks = covering(bytes.start, bytes.end);
        self.device.flush_range(blocks).map_err(of_write)
    }

    /// Makes durable what was written. Blocks.
    pub(crate) fn sync_now(&self) -> io::Result<()> {
        self.sync_within(Duration::MAX)
    }

    /// As [`sync_now`](Self::sync_now), but tries again for so long at most while the cache is busy.
    pub(crate) fn sync_within(&self, patience: Duration) -> io::Result<()> {
        let since = Instant::now();
        loop {
            match but_earlier(self.device.sync()) {
                Err(WriteError::Busy { .. }) if since.elapsed() < patience => {}
                result => return result.map_err(of_write),
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn plant(&self, bug: &'static str) {
        self.planted.set(bug).expect("one at a time");
    }

    /// Whether a test has planted that bug here.
    pub(crate) fn has_bug(&self, bug: &str) -> bool {
        #[cfg(test)]
        return self.planted.get() == Some(&bug);
        #[cfg(not(test))]
        {
            let _ = bug;
            false
        }
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image").field("device", &self.device).finish_non_exhaustive()
    }
}

/// A poisoned device says why a sync failed: to others it is lost data, whatever the reason.
pub(crate) fn of_get(error: GetError) -> io::Error {
    io::Error::from_raw_os_error(if let GetError::Poisoned { .. } = error {
        libc::EIO
    } else {
        error.errno()
    })
}

pub(crate) fn of_write(error: WriteError) -> io::Error {
    io::Error::from_raw_os_error(if let WriteError::Poisoned { .. } = error {
        libc::EIO
    } else {
        error.errno()
    })
}

/// What was written later is on the device all the same, or it would have failed again.
pub(crate) fn but_earlier(result: Result<(), WriteError>) -> Result<(), WriteError> {
    match result {
        Err(WriteError::Earlier { .. }) => Ok(()),
        result => result,
    }
}

/// The blocks that the bytes from `offset` to `end` lie in.
pub(crate) fn covering(offset: u64, end: u64) -> Range<u64> {
    offset / BLOCK as u64..end.div_ceil(BLOCK as u64)
}

fn bytes_of(blocks: &Range<u64>) -> usize {
    (blocks.end - blocks.start) as usize * BLOCK
}

/// Why a read or write of an image failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferError {
    pub(crate) errno: i32,
    /// Bytes that were transferred before the failure.
    pub(crate) transferred: usize,
}

impl From<RequestError> for TransferError {
    fn from(error: RequestError) -> Self {
        let errno = io::Error::from(error).raw_os_error().unwrap_or(libc::EIO);
        Self { errno, transferred: error.transferred() }
    }
}

impl From<io::Error> for TransferError {
    fn from(error: io::Error) -> Self {
        Self { errno: error.raw_os_error().unwrap_or(libc::EIO), transferred: 0 }
    }
}

impl From<TransferError> for io::Error {
    fn from(error: TransferError) -> Self {
        Self::from_raw_os_error(error.errno)
    }
}

/// The buffer of a READ of whole blocks, and the claimed loads of those that are kept. Its drop ends these.
#[derive(Debug)]
pub(crate) struct Fill {
    buf: AlignedBuf,
    /// Where its first block begins on the image.
    start: u64,
    /// Bytes before those that were asked for.
    head: usize,
    /// Bytes that were asked for.
    len: usize,
    loads: Vec<Load>,
}

impl Fill {
    /// Where the read begins.
    pub(crate) fn offset(&self) -> u64 {
        self.start
    }

    /// Keeps what was read, also before an error. Returns how much was read of what was asked for, the
    /// buffer with that. An error past those bytes does not count.
    pub(crate) fn finish(
        self,
        result: Result<usize, TransferError>,
    ) -> (io::Result<usize>, AlignedBuf) {
        let Self { mut buf, start, head, len, loads } = self;
        // How many bytes were read from `at`, of which `wanted` count.
        let read = |at: usize, wanted: usize| match result {
            Ok(count) => Ok(count.saturating_sub(at).min(wanted)),
            Err(error) if error.transferred >= at + wanted => Ok(wanted),
            Err(error) => Err(io::Error::from(error)),
        };
        for mut load in loads {
            let at = (load.offset() - start) as usize;
            let result = read(at, load.len());
            if let Ok(count) = result {
                load[..count].copy_from_slice(&buf[at..][..count]);
            }
            load.finish(result);
        }
        let result = read(head, len);
        if head > 0 {
            buf.copy_within(head..head + len, 0);
        }
        buf.set_len(len);
        (result, buf)
    }
}

impl Deref for Fill {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buf
    }
}

impl DerefMut for Fill {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buf
    }
}

// SAFETY: the buffer's own bytes and length; nothing of it is touched before the engine gives it back.
unsafe impl IoBuf for Fill {
    fn as_ptr(&self) -> *const u8 {
        IoBuf::as_ptr(&self.buf)
    }

    fn len(&self) -> usize {
        IoBuf::len(&self.buf)
    }
}

// SAFETY: as above; the same address.
unsafe impl IoBufMut for Fill {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        IoBufMut::as_mut_ptr(&mut self.buf)
    }
}
