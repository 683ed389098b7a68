//! WRITE: to the cache, or whole blocks to the image and the ends to the cache.

use std::io;
use std::ops::{Deref, Range};
#[cfg(test)]
use std::sync::Arc;
use std::time::Instant;

use aio_reap::{AlignedBuf, IoBuf};
use bufcache::{Bypass, GetError, WriteError};
use nbd_protocol::Request;

use super::{Job, change, get, os, transfer};
use crate::blocks::{BLOCK, Piece, Source, covering, ignore_earlier};
use crate::memory::ALIGN;
use crate::waits;

impl Job {
    /// Writes a buffer, of which `written` bytes are in the cache already.
    pub(super) async fn write<B: Bytes>(
        &self,
        offset: u64,
        buf: B,
        written: usize,
    ) -> (io::Result<()>, B) {
        if self.image.is_bypassed() {
            let whole = 0..buf.len();
            return self.write_image(buf, whole, offset, None).await;
        }
        if self.image.bypasses_cache(buf.len() as u64, true) {
            return self.write_around(offset, buf).await;
        }
        (self.write_cached(offset + written as u64, &buf[written..]).await, buf)
    }

    /// Writes to the cache. A whole block that gets no buffer is written to the image instead.
    /// Either all buffers are in use, or the image's last write-back failed; in that case the image
    /// takes the block or returns its error.
    async fn write_cached(&self, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        let image = &self.image;
        loop {
            let done =
                image.try_write(offset, bytes).map_err(|error| image.get_error_to_io(error))?;
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
                    // On a thread of the cache, because many WRITEs at a time may visit all dirty
                    // blocks. An error of this flush says why no buffer is free.
                    let all = move |device: &bufcache::Device| device.flush_range(0..u64::MAX);
                    change(|| image.device.call_async(all))
                        .await
                        .map_err(|error| image.write_error_to_io(error))?;
                    self.change(piece, write)
                        .await
                        .map_err(|error| image.get_error_to_io(error))?;
                }
                result => result.map_err(|error| image.get_error_to_io(error))?,
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
    async fn write_around<B: Bytes>(&self, offset: u64, buf: B) -> (io::Result<()>, B) {
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

    /// Writes a part of a buffer to the image, and ends its `bypass`. The engine holds the `bypass`
    /// together with the buffer.
    async fn write_image<B: Bytes>(
        &self,
        buf: B,
        part: Range<usize>,
        start: u64,
        bypass: Option<Box<Bypass>>,
    ) -> (io::Result<()>, B) {
        let (result, buf, bypass) = match &self.source {
            Source::File(file) => {
                let write = self.engine.write(file, Part { buf, part, bypass }, start);
                let ((_, result), Part { buf, bypass, .. }) = transfer(write).await;
                (result, buf, bypass)
            }
            // If the future is dropped, the server ends: no newer write can come before this one.
            #[cfg(feature = "objects")]
            Source::Volume(volume) => {
                let result = volume.write_async(start, &buf[part]).await;
                (result, buf, bypass)
            }
            #[cfg(test)]
            Source::Device(device, _) => {
                let device = Arc::clone(device);
                let write = move |_: &_| (device.write(start, &buf[part]), buf);
                let (result, buf) = self.image.device.call_async(write).await;
                (result, buf, bypass)
            }
        };
        let result = match bypass {
            Some(bypass) => {
                bypass.finish(result).map_err(|error| self.image.write_error_to_io(error))
            }
            None => result,
        };
        (result, buf)
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
                return self.write_image(buf, part, start, Some(Box::new(bypass))).await;
            }
            Ok(None) => {}
            Err(error) => return (Err(self.image.write_error_to_io(error)), buf),
        }
        let since = Instant::now();
        let write = move |device: &bufcache::Device| loop {
            match device.write_around(first, &buf[part.clone()]) {
                Err(WriteError::Busy { .. }) if since.elapsed() < waits::BLOCK => {}
                result => return (result, buf),
            }
        };
        let (result, buf) = self.image.device.call_async(write).await;
        (result.map_err(|error| self.image.write_error_to_io(error)), buf)
    }

    /// Makes the data of this WRITE durable.
    pub(super) async fn write_through(&self) -> io::Result<()> {
        if self.image.is_bypassed() {
            return self.image.sync().await;
        }
        let Request { offset, len, .. } = self.request;
        let blocks = covering(offset, offset + len);
        // Flush first: if the image is full, the flush fails without a loss of dirty blocks.
        let through = || async {
            self.image.device.flush_range_async(blocks.clone()).await?;
            ignore_earlier(self.image.device.write_through_async(blocks.clone()).await)
        };
        change(through).await.map_err(|error| self.image.write_error_to_io(error))
    }
}

/// The buffer of a [`Part`]. Its bytes do not move when the `Part` moves.
pub(super) trait Bytes: Deref<Target = [u8]> + Send + 'static {}

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
