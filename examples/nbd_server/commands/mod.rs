//! The NBD commands, each a future that runs on its worker.
//!
//! ```text
//!  READ          copy dirty blocks ─► read the image once ─► keep the blocks, if few ─► reply
//!  WRITE         short: to the cache, dirty    long: whole blocks to the image, ends to the cache
//!  TRIM          whole blocks: punch a hole
//!  ZEROES        whole blocks: punch a hole, or zero, or write zeros    ends: as a WRITE of zeros
//!  FLUSH, FUA    a sync of the cache, which requests share: see [`flushes`](crate::flushes)
//!  BLOCK_STATUS  write dirty blocks back ─► find the holes
//! ```
//!
//! With `--cache 0` the commands are the same, but each READ and WRITE goes to the image. A request
//! that the cache answers at once needs no future: see [`Image::try_write`] and
//! [`Image::try_read`].
//!
//! No future awaits while it holds a guard of a block, and none blocks. Reads and writes of an
//! image are made by the worker's engine or by the upstream. An operation that exists only as a
//! blocking call runs on a thread of the cache, of which each image has a few. Trims, zeroes, and
//! writes that the engine does not make would only wait for each other, so one of these threads
//! makes all of them: see [`calls`](crate::calls).
//!
//! # Why a READ may bypass the cache
//!
//! Before the image is read, the READ checks each block and copies it if it is dirty. A block that
//! is not dirty at that time is on the image as it was last answered. A WRITE after the check is
//! unanswered, or was sent while this READ was in flight: the READ may return either version. The
//! order matters: if the image were read first, a block that is written back and evicted between
//! the read and the check would be missed.

mod shared;
#[cfg(test)]
mod tests;

use std::future::{Future, poll_fn};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use aio_reap::{AlignedBuf, Engine, File, IoBuf, IoBufMut};
use bufcache::{Bypass, GetError, WriteError};
use nbd_protocol::{Command, HeaderStyle, Request};

use crate::blocks::{
    BLOCK, Image, Piece, Source, TransferError, covering, ignore_earlier, of_get, of_write,
};
use crate::extents;
use crate::memory::{self, ALIGN, MOST_ZEROS, ZEROS};

/// How long a command retries while a block is busy. A guess: longer than any operation of a disk.
const PATIENCE: Duration = Duration::from_secs(60);

/// Most dirty blocks that a READ copies before it has the rest written back and lets other requests
/// run. A guess: 256 KiB are copied in less time than a write takes.
const MAX_COPIED: usize = 64;

/// A command to carry out.
pub(crate) struct Job {
    pub(crate) engine: Rc<Engine>,
    /// What reads and writes the image when the cache is bypassed.
    pub(crate) source: Source<File>,
    pub(crate) image: Arc<Image>,
    /// The granularity of the export's extents, in bytes.
    pub(crate) unit: u64,
    pub(crate) style: HeaderStyle,
    pub(crate) command: Command,
    /// With the offset in the image, not in the export.
    pub(crate) request: Request,
    /// Bytes of a WRITE that are in the cache already.
    pub(crate) written: usize,
}

/// The result of a command, and its buffer.
type Ended = (io::Result<()>, Option<AlignedBuf>);

fn os(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn is_unsupported(result: &Result<(), WriteError>) -> bool {
    matches!(
        result,
        Err(WriteError::Io { errno: libc::EOPNOTSUPP | libc::ENODEV | libc::ENOSYS, .. })
    )
}

/// Retries while the block is busy. Each attempt waits as long as the cache does.
async fn retry_while_busy<T, E, F: Future<Output = Result<T, E>>>(
    is_busy: fn(&E) -> bool,
    mut ask: impl FnMut() -> F,
) -> Result<T, E> {
    let since = Instant::now();
    loop {
        match ask().await {
            Err(error) if is_busy(&error) && since.elapsed() < PATIENCE => {}
            result => return result,
        }
    }
}

async fn get<T, F: Future<Output = Result<T, GetError>>>(
    ask: impl FnMut() -> F,
) -> Result<T, GetError> {
    retry_while_busy(|error| *error == GetError::Busy, ask).await
}

async fn change<F: Future<Output = Result<(), WriteError>>>(
    ask: impl FnMut() -> F,
) -> Result<(), WriteError> {
    retry_while_busy(|error| matches!(error, WriteError::Busy { .. }), ask).await
}

/// Lets the worker poll other futures.
async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Copies of the blocks of a READ that are newer than the image.
#[derive(Default)]
struct Newer {
    blocks: Vec<u64>,
    bytes: Vec<u8>,
}

impl Newer {
    fn push(&mut self, block: u64, bytes: &[u8]) -> Result<(), GetError> {
        self.blocks.try_reserve(1).map_err(|_| GetError::NoMemory)?;
        // In steps, because `reserve` checks each for memory that the system needs.
        let has_room = self.bytes.len() + BLOCK <= self.bytes.capacity();
        if !has_room
            && !memory::reserve(&mut self.bytes, MAX_COPIED.min(1 + self.blocks.len()) * BLOCK)
        {
            return Err(GetError::NoMemory);
        }
        self.blocks.push(block);
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.blocks.len() * BLOCK, 0); // pads the last block of the image
        Ok(())
    }

    /// Copies the blocks over `into`, which was read from `offset` on.
    fn copy_over(&self, offset: u64, into: &mut [u8]) {
        for (block, bytes) in self.blocks.iter().zip(self.bytes.chunks_exact(BLOCK)) {
            let start = block * BLOCK as u64;
            let at = start.saturating_sub(offset) as usize;
            let from = offset.saturating_sub(start) as usize;
            let count = (BLOCK - from).min(into.len() - at);
            into[at..][..count].copy_from_slice(&bytes[from..][..count]);
        }
    }
}

impl Job {
    /// Carries out the command. `buf` is the buffer of a READ or BLOCK_STATUS, or the data of a
    /// WRITE.
    pub(crate) async fn run(self, buf: Option<AlignedBuf>) -> Ended {
        let Request { offset, len, .. } = self.request;
        let end = offset + len;
        match (self.command, buf) {
            (Command::Read { .. }, Some(buf)) => {
                let (result, buf) = self.read(buf).await;
                (result, Some(buf))
            }
            (Command::Write { fua }, Some(buf)) => {
                let (mut result, buf) = self.write(buf).await;
                if fua && result.is_ok() {
                    result = self.write_through().await;
                }
                (result, Some(buf))
            }
            (Command::BlockStatus { one }, Some(buf)) => self.find_holes(one, buf).await,
            (Command::Flush, buf) => (self.image.sync().await, buf),
            (Command::Trim { fua }, buf) => {
                let inner = self.image.inner(offset, end);
                let result = self.discard(inner).await;
                let trimmed = match is_unsupported(&result) {
                    true => Ok(()),                    // a TRIM may have no effect
                    false => result.map_err(of_write), // it need not trim the ends
                };
                (self.then_sync(fua, trimmed).await, buf)
            }
            (Command::WriteZeroes { fua, no_hole, fast }, buf) => {
                let inner = self.image.inner(offset, end);
                let zeroed = match self.zero(inner, no_hole, fast).await {
                    Ok(()) => self.zero_ends().await,
                    failed => failed,
                };
                (self.then_sync(fua, zeroed).await, buf)
            }
            (Command::Cache, buf) => {
                match &self.source {
                    // The command is only advice, so a failure is no error.
                    Source::File(file) => {
                        if let Ok(advice) = self.engine.will_need(file, offset, len).submit() {
                            let _ = advice.await;
                        }
                    }
                    _ if self.image.is_bypassed() => {} // nothing is cached
                    _ => self.image.device.readahead(covering(offset, end)),
                }
                (Ok(()), buf)
            }
            (_, buf) => (Err(os(libc::EINVAL)), buf),
        }
    }

    async fn then_sync(&self, fua: bool, result: io::Result<()>) -> io::Result<()> {
        if fua && result.is_ok() { self.image.sync().await } else { result }
    }

    async fn read(&self, buf: AlignedBuf) -> (io::Result<()>, AlignedBuf) {
        let Request { offset, len, .. } = self.request;
        let newer = match self.newer().await {
            Ok(newer) => newer,
            Err(error) => return (Err(of_get(error)), buf),
        };
        let (result, mut buf) = match self.image.fill(offset, buf) {
            Ok(fill) => {
                let start = fill.offset();
                let (result, fill) = self.read_image(fill, start).await;
                fill.finish(result)
            }
            Err(buf) => {
                let (result, buf) = self.read_image(buf, offset).await;
                (result.map_err(Into::into), buf)
            }
        };
        let result = result.and_then(|count| match (count as u64) < len {
            true => Err(os(libc::EIO)), // the image has been truncated since it was opened
            false => Ok(()),
        });
        newer.copy_over(offset, &mut buf);
        (result, buf)
    }

    /// Copies the blocks that are newer in the cache than on the image.
    async fn newer(&self) -> Result<Newer, GetError> {
        let Request { offset, len, .. } = self.request;
        let Image { device, .. } = &*self.image;
        let mut newer = Newer::default();
        let blocks = covering(offset, offset + len);
        let bypassed = self.image.is_bypassed() || self.image.has_bug("read-past-what-is-dirty");
        if bypassed || !device.is_newer(blocks.clone()) {
            return Ok(newer);
        }
        let mut limit = MAX_COPIED;
        for block in blocks.clone() {
            // The block may be written back and evicted before `get_async` finds it.
            while device.is_newer(block..block + 1) {
                if newer.blocks.len() == limit {
                    limit += MAX_COPIED;
                    // A block that cannot be written back stays dirty, and is copied then.
                    let rest = block..blocks.end;
                    let _ = device.call_async(move |device| device.flush_range(rest)).await;
                    yield_now().await;
                    continue;
                }
                match device.get_async(block).await {
                    Ok(pin) => newer.push(block, &pin)?,
                    Err(GetError::NoFreeBuffers) => continue,
                    Err(error) => return Err(error),
                }
                break;
            }
        }
        Ok(newer)
    }

    /// Reads from the image, past the cache.
    async fn read_image<B>(&self, buf: B, start: u64) -> (Result<usize, TransferError>, B)
    where
        B: IoBufMut + DerefMut<Target = [u8]> + Send + 'static,
    {
        match &self.source {
            Source::File(file) => transfer(self.engine.read(file, buf, start)).await,
            Source::Upstream(upstream) => {
                let (result, buf) = upstream.read_async(start, buf).await;
                (result.map_err(Into::into), buf)
            }
            #[cfg(test)]
            Source::Device(_, Some(file)) => transfer(self.engine.read(file, buf, start)).await,
            #[cfg(test)]
            Source::Device(device, None) => {
                let (device, mut buf) = (Arc::clone(device), buf);
                let read = move |_| (device.read(start, &mut buf).map_err(Into::into), buf);
                self.image.device.call_async(read).await
            }
        }
    }

    async fn write(&self, buf: AlignedBuf) -> (io::Result<()>, AlignedBuf) {
        let Request { offset, len, .. } = self.request;
        if self.image.is_bypassed() {
            let whole = 0..buf.len();
            let (result, buf, _) = self.write_image(buf, whole, offset, None).await;
            return (result, buf);
        }
        if self.image.bypasses_cache(len, true) {
            return self.write_past(buf).await;
        }
        (self.write_cached(offset + self.written as u64, &buf[self.written..]).await, buf)
    }

    /// Writes to the cache. A whole block that gets no buffer is written to the image instead.
    /// Either all buffers are in use, or the image's last write-back failed; in that case the image
    /// takes the block or returns its error.
    async fn write_cached(&self, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        let image = &self.image;
        loop {
            let done = image.try_write(offset, bytes).map_err(of_get)?;
            (offset, bytes) = (offset + done as u64, &bytes[done..]);
            // An empty range has no part.
            let Some(piece) = image.pieces(offset, bytes.len()).next().filter(|p| p.count > 0)
            else {
                return Ok(());
            };
            let part = &bytes[..piece.count];
            let write = |into: &mut [u8]| into.copy_from_slice(part);
            match self.change(piece, write).await {
                Err(GetError::NoFreeBuffers | GetError::Io { .. }) if piece.whole => {
                    let copy = AlignedBuf::try_zeroed(part.len(), ALIGN);
                    let mut copy = copy.ok_or_else(|| os(libc::ENOMEM))?;
                    copy.copy_from_slice(part);
                    self.write_blocks(piece.block, copy, 0..part.len()).await.0?;
                }
                Err(GetError::NoFreeBuffers) => {
                    let all = move |device: bufcache::Device| device.flush_range(0..u64::MAX);
                    // An error says why no buffer is free.
                    change(|| image.device.call_async(all)).await.map_err(of_write)?;
                    self.change(piece, write).await.map_err(of_get)?;
                }
                result => result.map_err(of_get)?,
            }
            (offset, bytes) = (offset + piece.count as u64, &bytes[piece.count..]);
        }
    }

    /// Changes a part of a block in the cache.
    async fn change(&self, piece: Piece, change: impl FnOnce(&mut [u8])) -> Result<(), GetError> {
        let Piece { block, from, count, whole } = piece;
        let device = &self.image.device;
        let mut guard = match whole {
            true => get(|| device.create_async(block)).await?,
            false => get(|| device.get_mut_async(block)).await?,
        };
        change(&mut guard[from..][..count]);
        Ok(())
    }

    /// Writes whole blocks to the image, and the parts of blocks at the ends to the cache.
    async fn write_past(&self, buf: AlignedBuf) -> (io::Result<()>, AlignedBuf) {
        let Request { offset, .. } = self.request;
        let end = offset + buf.len() as u64;
        let inner = self.image.inner(offset, end);
        if inner.is_empty() {
            return (self.write_cached(offset, &buf).await, buf);
        }
        let start = (inner.start * BLOCK as u64 - offset) as usize;
        let stop = ((inner.end * BLOCK as u64).min(end) - offset) as usize;
        if let Err(error) = self.write_cached(offset, &buf[..start]).await {
            return (Err(error), buf);
        }
        let (written, buf) = self.write_blocks(inner.start, buf, start..stop).await;
        match written {
            Ok(()) => (self.write_cached(offset + stop as u64, &buf[stop..]).await, buf),
            failed => (failed, buf),
        }
    }

    /// Writes a part of a buffer to the image. Only a write by the engine or to an upstream has a
    /// bypass, which the engine holds together with the buffer.
    async fn write_image<B: Bytes>(
        &self,
        buf: B,
        part: Range<usize>,
        start: u64,
        bypass: Option<Box<Bypass>>,
    ) -> (io::Result<()>, B, Option<Box<Bypass>>) {
        match &self.source {
            Source::File(file) => {
                let write = self.engine.write(file, Part { buf, part, bypass }, start);
                let (result, Part { buf, bypass, .. }) = transfer(write).await;
                (result.map(drop).map_err(Into::into), buf, bypass)
            }
            Source::Upstream(upstream) => {
                (upstream.write_async(start, &buf[part]).await, buf, bypass)
            }
            #[cfg(test)]
            Source::Device(device, _) => {
                let device = Arc::clone(device);
                let write = move |_: &Image| (device.write(start, &buf[part]), buf);
                let (result, buf) = self.image.call(write).await;
                (result, buf, bypass)
            }
        }
    }

    /// Writes whole blocks from a part of a buffer to the image, and removes them from the cache.
    /// This task writes them, unless the cache must wait for a block: then a thread of the cache
    /// does.
    async fn write_blocks<B: Bytes>(
        &self,
        first: u64,
        buf: B,
        part: Range<usize>,
    ) -> (io::Result<()>, B) {
        let start = first * BLOCK as u64;
        let blocks = covering(start, start + part.len() as u64);
        match self.image.device.try_bypass(blocks) {
            Ok(Some(bypass)) => {
                let bypass = Some(Box::new(bypass));
                let (result, buf, bypass) = self.write_image(buf, part, start, bypass).await;
                let result = match bypass {
                    Some(bypass) => bypass.finish(result).map_err(of_write),
                    None => result,
                };
                return (result, buf);
            }
            Ok(None) => {}
            Err(error) => return (Err(of_write(error)), buf),
        }
        let since = Instant::now();
        let write = {
            let part = part.clone();
            move |image: &Image| (image.device.write_past(first, &buf[part]), buf)
        };
        let (result, buf) = self.image.call(write).await;
        if !matches!(result, Err(WriteError::Busy { .. })) {
            return (result.map_err(of_write), buf);
        }
        // A block has been in use for long. Retry on another thread, so that the image's other
        // calls need not wait.
        let again = move |device: bufcache::Device| loop {
            match device.write_past(first, &buf[part.clone()]) {
                Err(WriteError::Busy { .. }) if since.elapsed() < PATIENCE => {}
                result => return (result.map_err(of_write), buf),
            }
        };
        self.image.device.call_async(again).await
    }

    /// Makes the data of this WRITE durable.
    async fn write_through(&self) -> io::Result<()> {
        if self.image.has_bug("fua-before-the-write") {
            return Ok(());
        }
        if self.image.is_bypassed() {
            return self.image.sync().await;
        }
        let Request { offset, len, .. } = self.request;
        let blocks = covering(offset, offset + len);
        // Flush first: if the image is full, the flush fails without a loss of dirty blocks.
        let panics = self.image.has_bug("a-call-that-panics");
        let through = move |device: bufcache::Device, blocks: Range<u64>| {
            assert!(!panics, "a bug that a test planted");
            device.flush_range(blocks.clone())?;
            ignore_earlier(device.write_through(blocks))
        };
        let call = || {
            let blocks = blocks.clone();
            self.image.device.call_async(move |device| through(device, blocks))
        };
        change(call).await.map_err(of_write)
    }

    /// Zeroes the parts of blocks at the ends of the range.
    async fn zero_ends(&self) -> io::Result<()> {
        let Request { offset, len, .. } = self.request;
        let end = offset + len;
        let inner = self.image.inner(offset, end);
        let (start, stop) = if inner.is_empty() {
            (end, end)
        } else {
            (inner.start * BLOCK as u64, end.min(inner.end * BLOCK as u64))
        };
        let zeros = memory::zeros().ok_or_else(|| os(libc::ENOMEM))?;
        // Both ends together are shorter than two blocks.
        for (from, to) in [(offset, start), (stop, end)] {
            let zeros = &zeros[..(to - from) as usize];
            if zeros.is_empty() {
                continue;
            }
            if self.image.is_bypassed() {
                self.write_image(zeros, 0..zeros.len(), from, None).await.0?;
            } else {
                self.write_cached(from, zeros).await?;
            }
        }
        Ok(())
    }

    async fn discard(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        let image = &self.image;
        // With O_DIRECT a discard does not take the lock of the page cache for which READs would
        // wait.
        if matches!(image.source, Source::Upstream(_)) || image.alignment > 1 {
            return change(|| image.device.discard_async(blocks.clone())).await;
        }
        let call = || {
            let blocks = blocks.clone();
            image.call(move |image| image.device.discard(blocks))
        };
        change(call).await
    }

    /// Zeroes whole blocks. With `no_hole` they stay allocated.
    async fn zero(&self, blocks: Range<u64>, no_hole: bool, fast: bool) -> io::Result<()> {
        let len = self.image.len();
        if !no_hole {
            let result = self.discard(blocks.clone()).await;
            if !is_unsupported(&result) {
                return result.map_err(of_write);
            }
        }
        let by_device = || {
            let blocks = blocks.clone();
            self.image.call(move |image| image.device.zero_by_device(blocks))
        };
        let result = change(by_device).await;
        if !is_unsupported(&result) {
            return result.map_err(of_write);
        }
        if fast {
            return Err(os(libc::EOPNOTSUPP));
        }
        if (blocks.end - blocks.start).saturating_mul(BLOCK as u64) > MOST_ZEROS {
            return Err(os(libc::EINVAL));
        }
        let zeros = memory::zeros().ok_or_else(|| os(libc::ENOMEM))?;
        let mut at = blocks.start;
        while at < blocks.end {
            let start = at * BLOCK as u64;
            let stop = (blocks.end * BLOCK as u64).min(len).min(start + ZEROS as u64);
            self.write_blocks(at, zeros, 0..(stop - start) as usize).await.0?;
            at = covering(start, stop).end;
        }
        Ok(())
    }

    async fn find_holes(&self, one: bool, mut buf: AlignedBuf) -> Ended {
        let Request { offset, len, .. } = self.request;
        let (image, style, how) = (Arc::clone(&self.image), self.style, (one, self.unit));
        let find = move |_| {
            let found = extents::find(&image, (offset, len), how, style, &mut buf);
            (found, Some(buf))
        };
        self.image.device.call_async(find).await
    }
}

/// The buffer of a [`Part`]. Its bytes do not move when the `Part` moves.
trait Bytes: Deref<Target = [u8]> + Send + 'static {}

impl Bytes for AlignedBuf {}
impl Bytes for &'static [u8] {}

/// A part of a buffer, to be written past the cache.
struct Part<B> {
    buf: B,
    part: Range<usize>,
    /// The engine holds the bypass with the buffer, so that the blocks stay excluded until the
    /// write ends, even if the future is dropped. Boxed, because the engine has room for small
    /// buffers only.
    bypass: Option<Box<Bypass>>,
}

// SAFETY: moving a `Bytes` does not move its bytes, and nothing changes them while the engine has
// the `Part`.
unsafe impl<B: Bytes> IoBuf for Part<B> {
    fn as_ptr(&self) -> *const u8 {
        self.buf[self.part.clone()].as_ptr()
    }

    fn len(&self) -> usize {
        self.part.len()
    }
}

/// Submits a read or write to the engine once it has room, and waits for the result.
async fn transfer<B: 'static>(
    request: aio_reap::Request<'_, B>,
) -> (Result<usize, TransferError>, B) {
    match request.submit_async().await {
        Ok(transfer) => {
            let (result, buf) = transfer.await;
            (result.map_err(Into::into), buf)
        }
        Err(refused) => {
            let errno = refused.errno();
            (Err(TransferError { errno, transferred: 0 }), refused.into_request().into_buf())
        }
    }
}
