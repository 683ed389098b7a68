//! READ: the blocks that are newer in the cache, over the rest from the image.
//!
//! # Why a READ may bypass the cache
//!
//! Before the image is read, the READ checks each block and copies it if it is dirty. A block that
//! is not dirty at that time is on the image as it was last answered. A WRITE after the check is
//! unanswered, or was sent while this READ was in flight: the READ may return either version. The
//! order matters: if the image were read first, a block that is written back and evicted between
//! the read and the check would be missed.

use std::future::poll_fn;
use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;
use std::task::Poll;

use aio_reap::AlignedBuf;
use bufcache::GetError;
use nbd_protocol::Request;
use rustix::io::{ReadWriteFlags, preadv2};

use super::{Job, os, transfer};
use crate::admission::SMALL;
use crate::blocks::{BLOCK, Image, Source, Transferred, covering};
use crate::memory;

/// Most dirty blocks that a READ copies before it has the rest written back and lets other requests
/// run. 256 KiB are copied in less time than a write takes.
pub(super) const MAX_COPIED: usize = 64;

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

/// Reads what the kernel has in its page cache, without a wait. The engine would need a submission
/// and a completion for the same copy.
fn read_now(file: impl AsFd, buf: &mut [u8], start: u64) -> Option<usize> {
    preadv2(file, &mut [IoSliceMut::new(buf)], start, ReadWriteFlags::NOWAIT).ok()
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
    pub(super) async fn read(&self, mut buf: AlignedBuf) -> (io::Result<()>, AlignedBuf) {
        let Request { offset, len, .. } = self.request;
        let newer = match self.newer().await {
            Ok(newer) => newer,
            Err(error) => return (Err(self.image.get_error_to_io(error)), buf),
        };
        // A future that is dropped ends its loads before the engine's read. That keeps no block, and
        // delays no WRITE that waits for a load.
        let fill = self.image.fill(offset, &mut buf);
        let (result, mut buf) = self.read_image(buf, fill.offset()).await;
        let result = fill.finish(result, &mut buf).and_then(|count| match (count as u64) < len {
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
        if self.image.is_bypassed() || !device.is_newer(blocks.clone()) {
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
                    let _ = device.flush_range_async(rest).await;
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

    /// Reads from the image, past the cache. What the page cache has is copied at once, but not for a
    /// large READ, which would delay small ones of the worker.
    async fn read_image(&self, mut buf: AlignedBuf, start: u64) -> (Transferred, AlignedBuf) {
        match &self.source {
            Source::File(file) => {
                let len = buf.len();
                let now = self.image.is_buffered && len as u64 <= SMALL;
                if now && read_now(file, &mut buf, start) == Some(len) {
                    return ((len, Ok(())), buf);
                }
                transfer(self.engine.read(file, buf, start)).await
            }
            #[cfg(feature = "objects")]
            Source::Volume(volume) => match volume.read_async(start, &mut buf).await {
                Ok(count) => ((count, Ok(())), buf),
                Err(error) => ((0, Err(error)), buf),
            },
            #[cfg(test)]
            Source::Device(_, file) => transfer(self.engine.read(file, buf, start)).await,
        }
    }
}
