//! The NBD commands, each a future that runs on its worker.
//!
//! ```text
//!  READ          copy dirty blocks ─► read the image once ─► keep the blocks, if few ─► reply
//!  WRITE         short: to the cache, dirty    long: whole blocks to the image, ends to the cache
//!  TRIM          whole blocks: punch a hole
//!  ZEROES        whole blocks: punch a hole, or zero, or write zeros    ends: as a WRITE of zeros
//!  FLUSH, FUA    a sync of the cache, which requests share
//!  BLOCK_STATUS  write dirty blocks back ─► find the holes
//! ```
//!
//! With `--cache 0` the commands are the same, but each READ and WRITE goes to the image. A request
//! that the cache answers at once needs no future: see [`Image::try_write`] and
//! [`Image::try_read`].
//!
//! No future awaits while it holds a guard of a block, and none blocks. Reads, writes, trims, zeroes
//! and syncs of an image are made by the worker's engine. An operation that exists only as a blocking
//! call runs on a thread of the cache, of which each image has a few.

mod read;
#[cfg(test)]
mod tests;
mod write;

use std::future::Future;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use aio_reap::{AlignedBuf, Engine, File};
use bufcache::{GetError, WriteError};
use nbd_protocol::{Command, HeaderStyle, Request};

use crate::blocks::{BLOCK, Image, Source, Transferred, ignore_earlier};
use crate::memory::{self, MOST_ZEROS, ZEROS};
use crate::waits;

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
            Err(error) if is_busy(&error) && since.elapsed() < waits::BLOCK => {}
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

impl Job {
    /// Carries out the command. `buf` is the buffer of a READ or BLOCK_STATUS, or the data of a
    /// WRITE.
    pub(crate) async fn run(&self, buf: Option<AlignedBuf>) -> Ended {
        let Request { offset, len, .. } = self.request;
        let end = offset + len;
        match (self.command, buf) {
            (Command::Read { .. }, Some(buf)) => {
                let (result, buf) = self.read(buf).await;
                (result, Some(buf))
            }
            (Command::Write { fua }, Some(buf)) => {
                let (mut result, buf) = self.write(offset, buf, self.written).await;
                if fua && result.is_ok() {
                    result = self.write_through().await;
                }
                (result, Some(buf))
            }
            (Command::BlockStatus { one }, Some(mut buf)) => {
                (self.block_status(one, &mut buf).await, Some(buf))
            }
            (Command::Flush, buf) => (self.image.sync().await, buf),
            (Command::Trim { fua }, buf) => {
                let inner = self.image.inner(offset, end);
                let result = self.discard(inner).await; // a TRIM need not trim the ends
                let trimmed = match is_unsupported(&result) {
                    true => Ok(()), // a TRIM may have no effect
                    false => result.map_err(|error| self.image.write_error_to_io(error)),
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
            (_, buf) => (Err(os(libc::EINVAL)), buf),
        }
    }

    async fn then_sync(&self, fua: bool, result: io::Result<()>) -> io::Result<()> {
        if fua && result.is_ok() { self.image.sync().await } else { result }
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
        // Both ends together are shorter than two blocks.
        self.write_zeros(offset, start).await?;
        self.write_zeros(stop, end).await
    }

    /// Writes zeros as a WRITE does.
    async fn write_zeros(&self, mut start: u64, end: u64) -> io::Result<()> {
        let zeros = memory::zeros().ok_or_else(|| os(libc::ENOMEM))?;
        while start < end {
            let part = (end - start).min(ZEROS as u64);
            self.write(start, &zeros[..part as usize], 0).await.0?;
            start += part;
        }
        Ok(())
    }

    async fn discard(&self, blocks: Range<u64>) -> Result<(), WriteError> {
        change(|| self.image.device.discard_async(blocks.clone())).await
    }

    /// Zeroes whole blocks. With `no_hole` they stay allocated.
    async fn zero(&self, blocks: Range<u64>, no_hole: bool, fast: bool) -> io::Result<()> {
        if !no_hole {
            let result = self.discard(blocks.clone()).await;
            if !is_unsupported(&result) {
                return result.map_err(|error| self.image.write_error_to_io(error));
            }
        }
        let result = change(|| self.image.device.zero_async(blocks.clone())).await;
        if !is_unsupported(&result) {
            return result.map_err(|error| self.image.write_error_to_io(error));
        }
        if fast {
            return Err(os(libc::EOPNOTSUPP));
        }
        if (blocks.end - blocks.start).saturating_mul(BLOCK as u64) > MOST_ZEROS {
            return Err(os(libc::EINVAL));
        }
        let end = (blocks.end * BLOCK as u64).min(self.image.len());
        self.write_zeros(blocks.start * BLOCK as u64, end).await
    }
}

impl Image {
    /// Makes everything written before durable. FLUSHes that come while a sync runs share the next
    /// one. A sync that has begun goes on if the future is dropped.
    pub(crate) async fn sync(&self) -> io::Result<()> {
        let sync = || async { ignore_earlier(self.device.sync_async().await) };
        change(sync).await.map_err(|error| self.write_error_to_io(error))
    }
}

/// Submits a read or write to the engine once it has room, and waits for the result.
async fn transfer<B: 'static>(request: aio_reap::Request<'_, B>) -> (Transferred, B) {
    match request.submit_async().await {
        Ok(transfer) => match transfer.await {
            (Ok(count), buf) => ((count, Ok(())), buf),
            (Err(error), buf) => ((error.transferred(), Err(error.into())), buf),
        },
        Err(refused) => {
            let error = os(refused.errno());
            ((0, Err(error)), refused.into_request().into_buf())
        }
    }
}
