//! Blocks of the images that are kept in memory.
//!
//! ```text
//!  READ ─► all there? ─yes─► copied to the reply's buffer: no operation, no wait
//!             │ no
//!             ├─► anything dirty? ─yes─► a hand: block by block; or writes it back first, where that is long
//!             └─► whole blocks into the reply's buffer, by one operation ─► copied to the cache ─► reply
//!  WRITE ─► each block there, or a buffer free? ─yes─► copied to the cache, dirty ─► reply
//!             └─no─► a hand waits for it; long ones go past the cache, to the image
//!  TRIM, WRITE_ZEROES, FLUSH, FUA ─► a hand
//! ```
//!
//! A worker never waits: what has to is done by one of the [`hands`](crate::hands). All changes go by way of
//! the cache, also those past it, which exclude others from their blocks, so what was answered is on the
//! image, or it is dirty here. A READ may pass the cache by where nothing of its blocks is dirty: what was
//! answered before it came is on the image then, and what is not answered yet it may see or not. It asks
//! before it reads; to read first, and to put what is dirty over it, would miss what was written back and
//! evicted in between.
//!
//! Who reads for the cache claims its blocks before the read begins: who writes to one of them waits, and
//! that is a hand. A block that cannot be claimed, because it is there, or is read for another, or no
//! buffer is free, is answered all the same, and not kept: nobody waits for another's read, nor hears of
//! its failure.
//!
//! FLUSH is a sync of the cache's device, which those who ask at the same time share. A sync that fails
//! poisons it, for as long as the server lives: writes, trims and flushes get EIO from then on, and reads
//! what is in the cache, or on the image and was not written since the last good sync. The rest may be
//! lost: EIO, too. What cannot be written back stays dirty, can be read, and is tried again.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use aio_reap::{AlignedBuf, IoBuf, IoBufMut, RequestError};
use bufcache::{
    AttachOptions, BlockDevice, BuildError, Cache, CacheStats, Device, FileDevice, Load,
};
use tracing::{error, warn};

use crate::admission::SMALL;
use crate::slots::Slots;
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
/// Bytes of a cache through which all passes: for parts of blocks, and what is excluded from what. A guess.
const BYPASS: usize = 1 << 20;
/// How long a hand waits for a buffer while none can be written back. A guess: a disk that is full says so at
/// once, and one that is slow may take seconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// The cache, and the images in it.
#[derive(Debug)]
pub(crate) struct Blocks {
    cache: Cache,
    /// By index of the export table's files.
    images: Slots<Option<Arc<Image>>>,
    /// Longest READ that is kept, and WRITE unless that is [`SCAN`]. What is longer is mostly used once, and
    /// the device's time for the bytes counts for more than that for the request.
    longest: u64,
}

/// An image in the cache.
pub(crate) struct Image {
    pub(crate) device: Device,
    /// What is below the cache.
    pub(crate) raw: Arc<dyn BlockDevice>,
    /// What is below the cache, if that is an export of another server: no engine reads or writes it.
    pub(crate) upstream: Option<Arc<NbdDevice>>,
    /// In bytes.
    pub(crate) len: u64,
    /// Where the last READ ended that found something missing.
    next: AtomicU64,
    /// A bug, for a test to find.
    #[cfg(test)]
    planted: std::sync::OnceLock<&'static str>,
}

impl Blocks {
    /// A cache of so many bytes for these files, which have so many names.
    pub(crate) fn new(bytes: u64, files: &[File], exports: usize) -> io::Result<Self> {
        Self::on(bytes, (files, exports), device)
    }

    /// The same, where `open` says what reads and writes a file.
    pub(crate) fn on(
        bytes: u64,
        (files, exports): (&[File], usize),
        open: impl Fn(&File) -> io::Result<Arc<dyn BlockDevice>>,
    ) -> io::Result<Self> {
        let bypass = bytes == 0;
        let capacity = if bypass { BYPASS } else { usize::try_from(bytes).unwrap_or(usize::MAX) };
        let cache =
            Cache::builder(capacity).block_sizes(BLOCK, BLOCK).patience(PATIENCE).build()?;
        let images = Slots::new(exports.max(files.len()));
        for file in files {
            let _ = images.push(Image::new(&cache, open(file)?, None)?); // there is room
        }
        let longest = if bypass { 0 } else { SMALL.min(bytes / SHARE).max(BLOCK as u64) };
        Ok(Self { cache, images, longest })
    }

    /// Begins to keep what is read of the table's next file.
    pub(crate) fn attach(&self, file: &File) -> io::Result<()> {
        let image = match self.longest {
            0 => None,
            _ => Image::new(&self.cache, device(file)?, None)?,
        };
        self.images.push(image).map(drop).map_err(|_| io::Error::other("too many images"))
    }

    /// The same of an export of another server.
    pub(crate) fn attach_upstream(&self, device: Arc<NbdDevice>) -> io::Result<()> {
        let raw = Arc::clone(&device) as Arc<dyn BlockDevice>;
        let image = Image::new(&self.cache, raw, Some(device))?;
        self.images.push(image).map(drop).map_err(|_| io::Error::other("too many images"))
    }

    /// Ends that of a file of which nothing is used any more, so that the same can be attached again.
    pub(crate) fn detach(&self, file: usize) -> io::Result<()> {
        let Some(image) = self.image(file) else { return Ok(()) };
        let closed = image.device.clone().close();
        closed.map_err(|error| io::Error::from_raw_os_error(error.error.errno()))
    }

    /// What is kept of a file, if it is.
    pub(crate) fn image(&self, file: usize) -> Option<&Arc<Image>> {
        self.images[file].as_ref()
    }

    /// Whether a READ or WRITE is too long to be kept.
    pub(crate) fn passes_by(&self, len: u64, write: bool) -> bool {
        len > if write { self.longest.min(SCAN as u64) } else { self.longest }
    }

    /// The image, and the blocks that bytes of it lie in; unless these are none or too many.
    fn find(&self, file: usize, offset: u64, len: usize) -> Option<(&Image, Range<u64>)> {
        let end = offset.checked_add(len as u64)?;
        let image = self.images[file].as_ref()?;
        let kept = (1..=self.longest).contains(&(len as u64)) && end <= image.len;
        kept.then(|| (&**image, covering(offset, end)))
    }

    /// How large the buffer of a READ has to be.
    pub(crate) fn room(&self, file: usize, offset: u64, len: usize) -> usize {
        self.find(file, offset, len).map_or(len, |(_, blocks)| bytes_of(&blocks))
    }

    /// Fills `bytes`, if all of them are there.
    pub(crate) fn read(&self, file: usize, offset: u64, bytes: &mut [u8]) -> bool {
        let Some((image, blocks)) = self.find(file, offset, bytes.len()) else { return false };
        let (mut from, mut done) = ((offset % BLOCK as u64) as usize, 0);
        for block in blocks {
            let Ok(guard) = image.device.try_get(block) else { return false };
            let count = (BLOCK - from).min(bytes.len() - done);
            bytes[done..][..count].copy_from_slice(&guard[from..][..count]);
            (from, done) = (0, done + count);
        }
        true
    }

    /// Makes of a READ's buffer one for the whole blocks, and claims those that are not there. The
    /// buffer comes back where nothing is to be kept.
    pub(crate) fn fill(
        &self,
        file: usize,
        offset: u64,
        mut buf: AlignedBuf,
        room: &mut Vec<Vec<Load>>,
    ) -> Result<Fill, AlignedBuf> {
        let len = buf.len();
        let Some((image, blocks)) = self.find(file, offset, len) else { return Err(buf) };
        let whole = bytes_of(&blocks);
        // Ordering: Relaxed; a hint.
        let follows = image.next.swap(offset + len as u64, Ordering::Relaxed) == offset;
        if buf.capacity() < whole || (follows && len >= SCAN) {
            return Err(buf);
        }
        buf.set_len(whole);
        let start = blocks.start * BLOCK as u64;
        let mut loads = room.pop().unwrap_or_default();
        let has_room = loads.try_reserve((blocks.end - blocks.start) as usize).is_ok();
        for block in blocks.filter(|_| has_room) {
            match image.device.claim(block) {
                Ok(claimed) => loads.extend(claimed),
                Err(_) => break, // it is not kept
            }
        }
        Ok(Fill { buf, start, head: (offset - start) as usize, len, loads })
    }

    /// Writes to the image what is newer here. Blocks.
    pub(crate) fn settle(&self, file: usize, bytes: Range<u64>) -> io::Result<()> {
        self.image(file).map_or(Ok(()), |image| image.settle(bytes))
    }

    pub(crate) fn stats(&self) -> CacheStats {
        self.cache.stats()
    }
}

impl Image {
    /// `None` where the device takes no blocks as small as ours.
    fn new(
        cache: &Cache,
        raw: Arc<dyn BlockDevice>,
        upstream: Option<Arc<NbdDevice>>,
    ) -> io::Result<Option<Arc<Self>>> {
        let len = raw.len();
        let options = AttachOptions::new(BLOCK).on_loss(|error| error!(%error, "blocks are lost"));
        match cache.attach_with(Arc::clone(&raw), options) {
            Ok(device) => Ok(Some(Arc::new(Self {
                device,
                raw,
                upstream,
                len,
                next: AtomicU64::new(u64::MAX),
                #[cfg(test)]
                planted: std::sync::OnceLock::new(),
            }))),
            Err(error @ (BuildError::Misaligned { .. } | BuildError::DeviceTooLarge(_))) => {
                warn!(%error, "an image is not kept in memory");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Image {
    #[cfg(test)]
    pub(crate) fn plant(&self, bug: &'static str) {
        self.planted.set(bug).expect("one at a time");
    }

    /// Forgets what is kept of it, which has to be on the device. Whether all is forgotten: it is where nobody
    /// uses the image.
    pub(crate) fn forget(&self) -> bool {
        let all = pin!(self.device.invalidation(0..u64::MAX));
        matches!(all.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(_)))
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

/// What reads and writes a file.
fn device(file: &File) -> io::Result<Arc<dyn BlockDevice>> {
    let device = FileDevice::new(file.try_clone()?)?;
    // With O_DIRECT no part of a unit can be written; exports are rounded down as well.
    let len = device.len() / device.alignment() as u64 * device.alignment() as u64;
    Ok(Arc::new(device.up_to(len)))
}

/// The blocks that the bytes from `offset` to `end` lie in.
pub(crate) fn covering(offset: u64, end: u64) -> Range<u64> {
    offset / BLOCK as u64..end.div_ceil(BLOCK as u64)
}

fn bytes_of(blocks: &Range<u64>) -> usize {
    (blocks.end - blocks.start) as usize * BLOCK
}

/// The buffer of a READ that is to be kept, with the blocks that it was to be kept in. Dropped, it lets
/// others read these.
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
    /// buffer with that, and the room for claims. An error past those bytes does not count.
    pub(crate) fn finish(
        self,
        result: Result<usize, RequestError>,
    ) -> (io::Result<usize>, AlignedBuf, Vec<Load>) {
        let Self { mut buf, start, head, len, mut loads } = self;
        // How many bytes were read from `at`, of which `wanted` count.
        let read = |at: usize, wanted: usize| match result {
            Ok(count) => Ok(count.saturating_sub(at).min(wanted)),
            Err(error) if error.transferred() >= at + wanted => Ok(wanted),
            Err(error) => Err(io::Error::from(error)),
        };
        for mut load in loads.drain(..) {
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
        (result, buf, loads)
    }

    /// The same of a read that was not made.
    pub(crate) fn cancel(mut self) -> AlignedBuf {
        self.loads.clear();
        self.finish(Ok(0)).1
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use aio_reap::Engine;
    use aio_reap_test::Build;
    use aio_reap_test::scripted::{Script, Transfer};

    use super::*;
    use crate::memory::ALIGN;

    /// An image of so many bytes, each of which tells where it is, and a cache for it.
    fn image(len: usize, cache: u64) -> (File, Vec<u8>, Blocks) {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| (at / 8 * 37 + at) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let blocks = Blocks::new(cache, &[file.try_clone().unwrap()], 1).unwrap();
        (file, bytes, blocks)
    }

    /// As a worker does: from memory, or from the file.
    fn read(blocks: &Blocks, file: &File, offset: u64, len: usize) -> (io::Result<Vec<u8>>, bool) {
        let mut buf = AlignedBuf::zeroed(blocks.room(0, offset, len), ALIGN);
        buf.set_len(len);
        if blocks.read(0, offset, &mut buf) {
            return (Ok(buf.to_vec()), true);
        }
        let (result, buf) = match blocks.fill(0, offset, buf, &mut Vec::new()) {
            Ok(mut fill) => {
                let count = read_up_to(file, fill.offset(), &mut fill.buf).unwrap();
                let (result, buf, _) = fill.finish(Ok(count));
                (result, buf)
            }
            Err(mut buf) => (read_up_to(file, offset, &mut buf), buf),
        };
        (result.map(|count| buf[..count].to_vec()), false)
    }

    fn read_up_to(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        loop {
            match file.read_at(&mut buf[done..], offset + done as u64)? {
                0 => return Ok(done),
                count => done += count,
            }
        }
    }

    #[test]
    fn any_part_of_an_image_of_any_size_is_read_and_kept() {
        const LEN: usize = 3 * BLOCK + 1000;
        let edges = [0, 1, 511, 4095, 4096, 4097, 8191, 8192, 12_288, 12_300, LEN - 1, LEN];
        for (at, &start) in edges.iter().enumerate() {
            for &end in &edges[at + 1..] {
                let (file, bytes, blocks) = image(LEN, 1 << 20);
                let (offset, len) = (start as u64, end - start);
                for again in [false, true] {
                    let (found, hit) = read(&blocks, &file, offset, len);
                    assert!(found.unwrap() == bytes[start..end], "{start}..{end}");
                    assert_eq!(hit, again, "{start}..{end}");
                }
                // Each block whole: what lies around it is there as well.
                let whole = start / BLOCK * BLOCK..end.next_multiple_of(BLOCK).min(LEN);
                let (found, hit) = read(&blocks, &file, whole.start as u64, whole.len());
                assert!(hit && found.unwrap() == bytes[whole]);
            }
        }
    }

    #[test]
    fn what_cannot_be_kept_is_read_all_the_same() {
        // Two blocks: less than what is asked for, which shares them.
        let (file, bytes, blocks) = image(64 * BLOCK, 2 * BLOCK as u64);
        for _ in 0..2 {
            let (found, hit) = read(&blocks, &file, 0, 16 * BLOCK);
            assert!(!hit && found.unwrap() == bytes[..16 * BLOCK]);
        }
        for round in 0..2 {
            let (found, hit) = read(&blocks, &file, 100, BLOCK); // of two blocks
            assert!(found.unwrap() == bytes[100..100 + BLOCK]);
            assert_eq!(hit, round > 0);
        }
        // While others have them.
        let guards = [0, 1].map(|block| blocks.images[0].as_ref().unwrap().device.get(block));
        let (found, hit) = read(&blocks, &file, 5 * BLOCK as u64, BLOCK);
        assert!(!hit && found.unwrap() == bytes[5 * BLOCK..6 * BLOCK]);
        assert!(!read(&blocks, &file, 5 * BLOCK as u64, BLOCK).1);
        drop(guards);
        assert!(!read(&blocks, &file, 5 * BLOCK as u64, BLOCK).1);
        assert!(read(&blocks, &file, 5 * BLOCK as u64, BLOCK).1);
    }

    #[test]
    fn a_scan_is_not_kept_and_small_reads_are() {
        let (file, bytes, blocks) = image(64 * BLOCK, 1 << 20);
        for (len, kept) in [(SCAN, 0), (BLOCK, 16)] {
            for at in (0..16 * BLOCK).step_by(len) {
                let (found, _) = read(&blocks, &file, at as u64, len);
                assert!(found.unwrap() == bytes[at..at + len]);
            }
            // The first of a scan is not known to be one.
            let there = |&at: &usize| blocks.read(0, (at * BLOCK) as u64, &mut [0; BLOCK]);
            assert_eq!((0..16).filter(there).count(), kept.max(SCAN / BLOCK), "{len}");
        }
    }

    #[test]
    fn the_blocks_that_a_shrunken_image_has_left_are_kept_and_no_others() {
        let (file, bytes, blocks) = image(4 * BLOCK, 1 << 20);
        file.set_len(BLOCK as u64 + 100).unwrap();
        let (found, hit) = read(&blocks, &file, 0, 4 * BLOCK);
        assert!(!hit && found.unwrap().len() == BLOCK + 100);
        assert!(read(&blocks, &file, 0, BLOCK).1, "the first was read whole");
        file.write_all_at(&bytes, 0).unwrap();
        let (found, hit) = read(&blocks, &file, BLOCK as u64, BLOCK);
        assert!(!hit && found.unwrap() == bytes[BLOCK..2 * BLOCK], "zeros were kept");
    }

    /// A READ of whole blocks may fail past the requested bytes. Those bytes are the answer then, and the
    /// blocks before the failure are kept.
    #[test]
    fn what_was_read_before_an_error_is_used() {
        for (read, answered, kept) in
            [(2 * BLOCK + 60, true, 2), (2 * BLOCK + 40, false, 2), (10, false, 0)]
        {
            let (file, bytes, blocks) = image(3 * BLOCK, 1 << 20);
            let script = Script::new();
            let engine = Engine::builder().build_scripted(&script).unwrap();
            let attached = engine.attach(file.try_clone().unwrap()).unwrap();
            script.on_transfer(Transfer::Short(read));
            script.on_transfer(Transfer::Fail(libc::EIO));
            let (offset, len) = (100, 2 * BLOCK - 50); // ends 50 bytes into the third block
            let mut buf = AlignedBuf::zeroed(blocks.room(0, offset, len), ALIGN);
            buf.set_len(len);
            let fill = blocks.fill(0, offset, buf, &mut Vec::new()).unwrap();
            let start = fill.offset();
            let (result, fill) = engine.read(&attached, fill, start).submit().unwrap().wait();
            assert_eq!(result.unwrap_err().transferred(), read);
            let (result, buf, _) = fill.finish(result);
            assert_eq!(result.is_ok(), answered, "{read}");
            if answered {
                assert!(buf[..result.unwrap()] == bytes[100..][..len]);
            }
            let there = |&at: &usize| blocks.read(0, (at * BLOCK) as u64, &mut [0; BLOCK]);
            assert_eq!((0..3).filter(there).count(), kept, "{read}");
        }
    }

    #[test]
    fn a_cache_needs_a_block_at_least() {
        let file = tempfile::tempfile().unwrap();
        assert!(Blocks::new(BLOCK as u64 - 1, &[], 0).is_err());
        let blocks = Blocks::new(BLOCK as u64, &[file], 1).unwrap(); // of nothing
        assert_eq!((blocks.room(0, 0, 5000), blocks.read(0, 0, &mut [])), (5000, false));
    }
}
