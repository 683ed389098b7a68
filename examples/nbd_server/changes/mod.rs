//! What a request becomes where its image is cached: an answer at once, a job for a hand, or an operation
//! of the engine.
//!
//! See [`blocks`](crate::blocks) for the whole, and for why each of them is right.

#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aio_reap::AlignedBuf;
use bufcache::{GetError, WriteError};
use nbd_protocol::{Command, Request};

use crate::blocks::{BLOCK, Blocks, Image, covering};
use crate::memory::{self, ALIGN, MOST_ZEROS, ZEROS};

/// A job goes on asking for a block that others have for so long. A guess: longer than a disk takes for
/// anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a request goes on.
#[derive(Debug)]
pub(crate) enum Way {
    /// It is done, or cannot be.
    Answer(io::Result<()>),
    /// Somebody has to wait for it.
    Hand(Work),
    /// The image is as new as the cache, or is not cached.
    Engine,
}

/// What somebody has to wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// To read block by block.
    Read,
    /// To read what no engine does; `past` the cache.
    Upstream {
        past: bool,
    },
    /// To write back what is to be read from the image.
    Settle,
    /// To write what is left, behind so many bytes; `past` the cache what is whole blocks.
    Write {
        done: usize,
        past: bool,
        fua: bool,
    },
    Trim {
        fua: bool,
    },
    Zeroes {
        fua: bool,
        no_hole: bool,
        fast: bool,
    },
    Flush,
    /// To look for holes, in an image that need not be cached; see [`extents`](crate::extents).
    Map {
        one: bool,
    },
}

/// A request that a hand works on.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) image: Arc<Image>,
    pub(crate) work: Work,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// How a job ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// The image has what is to be read: the engine may.
    Settled,
}

/// A part of a request that lies in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    block: u64,
    /// In the block.
    from: usize,
    count: usize,
    /// Nothing of the block is left out that the image has.
    whole: bool,
}

fn os(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// A poisoned device says why a sync failed: to others it is lost data, whatever the reason.
fn of_get(error: GetError) -> io::Error {
    os(if let GetError::Poisoned { .. } = error { libc::EIO } else { error.errno() })
}

fn of_write(error: WriteError) -> io::Error {
    os(if let WriteError::Poisoned { .. } = error { libc::EIO } else { error.errno() })
}

/// What was written later is on the device all the same, or it would have failed again.
fn but_earlier(result: Result<(), WriteError>) -> Result<(), WriteError> {
    match result {
        Err(WriteError::Earlier { .. }) => Ok(()),
        result => result,
    }
}

fn is_unsupported(result: &Result<(), WriteError>) -> bool {
    matches!(
        result,
        Err(WriteError::Io { errno: libc::EOPNOTSUPP | libc::ENODEV | libc::ENOSYS, .. })
    )
}

/// Asks again while others have the block.
fn patiently<T, E>(
    is_busy: impl Fn(&E) -> bool,
    mut ask: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let since = Instant::now();
    loop {
        match ask() {
            Err(error) if is_busy(&error) && since.elapsed() < PATIENCE => {}
            result => return result,
        }
    }
}

fn get<T>(ask: impl FnMut() -> Result<T, GetError>) -> Result<T, GetError> {
    patiently(|error| *error == GetError::Busy, ask)
}

fn change(ask: impl FnMut() -> Result<(), WriteError>) -> Result<(), WriteError> {
    patiently(|error| matches!(error, WriteError::Busy { .. }), ask)
}

impl Blocks {
    /// Carries out what can be without a wait. `bytes` is a READ's buffer, or a WRITE's data.
    pub(crate) fn begin(
        &self,
        file: usize,
        command: Command,
        request: &Request,
        bytes: &mut [u8],
    ) -> Way {
        let Some(image) = self.image(file) else { return Way::Engine };
        let Request { offset, len, .. } = *request;
        let past = self.passes_by(len, matches!(command, Command::Write { .. }));
        Way::Hand(match command {
            Command::Read { .. } => {
                if self.read(file, offset, bytes) {
                    return Way::Answer(Ok(()));
                }
                if image.upstream.is_some() {
                    return Way::Hand(Work::Upstream { past });
                }
                let blocks = covering(offset, offset + len);
                if !image.device.is_newer(blocks) || image.has_bug("read-past-what-is-dirty") {
                    return Way::Engine;
                }
                if past { Work::Settle } else { Work::Read }
            }
            Command::Write { fua } => {
                let done = match past {
                    true => 0,
                    false => match image.try_write(offset, bytes) {
                        Ok(done) if done == bytes.len() && !fua => return Way::Answer(Ok(())),
                        Ok(done) => done,
                        Err(error) => return Way::Answer(Err(of_get(error))),
                    },
                };
                Work::Write { done, past, fua }
            }
            Command::Flush => Work::Flush,
            Command::Trim { fua } => Work::Trim { fua },
            Command::WriteZeroes { fua, no_hole, fast } => Work::Zeroes { fua, no_hole, fast },
            _ => return Way::Engine,
        })
    }
}

impl Image {
    /// The parts of a range, block by block.
    fn pieces(&self, offset: u64, len: usize) -> impl Iterator<Item = Piece> + use<> {
        let (image_end, end) = (self.len, offset + len as u64);
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
    fn inner(&self, offset: u64, end: u64) -> Range<u64> {
        let start = offset.div_ceil(BLOCK as u64);
        let stop = if end == self.len { covering(0, end).end } else { end / BLOCK as u64 };
        start..stop.max(start)
    }

    /// Writes to the cache without a wait. Returns how many bytes; the rest has to wait.
    fn try_write(&self, offset: u64, bytes: &[u8]) -> Result<usize, GetError> {
        let mut done = 0;
        for Piece { block, from, count, whole } in self.pieces(offset, bytes.len()) {
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

    /// Writes to the cache. A whole block that gets no buffer there goes to the image: all buffers are in use,
    /// or the image's last write-back failed. The image then takes it or returns its error.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(()); // and no part of a block, which would have to be read
        }
        let mut done = 0;
        for piece in self.pieces(offset, bytes.len()) {
            let part = &bytes[done..][..piece.count];
            let write = |into: &mut [u8]| into.copy_from_slice(part);
            match self.change(piece, write) {
                Err(GetError::NoFreeBuffers | GetError::Io { .. }) if piece.whole => {
                    change(|| self.device.write_past(piece.block, part)).map_err(of_write)?;
                }
                Err(GetError::NoFreeBuffers) => {
                    self.settle(0..self.len)?; // or it says why there are none
                    self.change(piece, write).map_err(of_get)?;
                }
                result => result.map_err(of_get)?,
            }
            done += piece.count;
        }
        Ok(())
    }

    /// Changes a part of a block in the cache.
    fn change(&self, piece: Piece, change: impl FnOnce(&mut [u8])) -> Result<(), GetError> {
        let Piece { block, from, count, whole } = piece;
        let device = &self.device;
        let mut guard = get(|| if whole { device.create(block) } else { device.get_mut(block) })?;
        change(&mut guard[from..][..count]);
        Ok(())
    }

    /// Writes whole blocks to the image, what is beside them to the cache.
    fn write_past(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        let inner = self.inner(offset, end);
        if inner.is_empty() {
            return self.write(offset, bytes);
        }
        let start = inner.start * BLOCK as u64;
        let stop = (inner.end * BLOCK as u64).min(end);
        let (head, rest) = bytes.split_at((start - offset) as usize);
        let (whole, tail) = rest.split_at((stop - start) as usize);
        self.write(offset, head)?;
        change(|| self.device.write_past(inner.start, whole)).map_err(of_write)?;
        self.write(stop, tail)
    }

    /// Zeroes the parts of blocks at the ends of a range.
    fn zero_ends(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset + len;
        let inner = self.inner(offset, end);
        let (start, stop) = if inner.is_empty() {
            (end, end)
        } else {
            (inner.start * BLOCK as u64, end.min(inner.end * BLOCK as u64))
        };
        // Neither end is longer than a block, however long the range is.
        for (from, to) in [(offset, start), (stop, end)] {
            for piece in self.pieces(from, (to - from) as usize) {
                self.change(piece, |bytes| bytes.fill(0)).map_err(of_get)?;
            }
        }
        Ok(())
    }

    /// Zeroes whole blocks, with or without room for them kept.
    fn zero(&self, blocks: Range<u64>, no_hole: bool, fast: bool) -> io::Result<()> {
        let device = &self.device;
        if !no_hole {
            let result = change(|| device.discard(blocks.clone()));
            if !is_unsupported(&result) {
                return result.map_err(of_write);
            }
        }
        let result = change(|| device.zero_by_device(blocks.clone()));
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
            let stop = (blocks.end * BLOCK as u64).min(self.len).min(start + ZEROS as u64);
            let run = &zeros[..(stop - start) as usize];
            change(|| device.write_past(at, run)).map_err(of_write)?;
            at = covering(start, stop).end;
        }
        Ok(())
    }

    /// Reads block by block, from the cache or through it.
    fn read_all(&self, offset: u64, bytes: &mut [u8], once: bool) -> io::Result<()> {
        let mut done = 0;
        for Piece { block, from, count, .. } in self.pieces(offset, bytes.len()) {
            let into = &mut bytes[done..][..count];
            done += count;
            let device = &self.device;
            match get(|| if once { device.get_once(block) } else { device.get(block) }) {
                Ok(guard) => into.copy_from_slice(&guard[from..][..count]),
                Err(GetError::NoFreeBuffers) if !device.is_newer(block..block + 1) => {
                    let there = AlignedBuf::try_zeroed(BLOCK, ALIGN);
                    let mut there = there.ok_or_else(|| os(libc::ENOMEM))?;
                    let count = self.raw.read(block * BLOCK as u64, &mut there)?;
                    if count < from + into.len() {
                        return Err(os(libc::EIO)); // it is shorter than it was
                    }
                    into.copy_from_slice(&there[from..][..into.len()]);
                }
                Err(error) => return Err(of_get(error)),
            }
        }
        Ok(())
    }

    /// Reads whole blocks from the image, of which nothing is dirty.
    fn read_past(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let blocks = covering(offset, offset + bytes.len() as u64);
        let start = blocks.start * BLOCK as u64;
        let len = (blocks.end * BLOCK as u64).min(self.len) - start;
        if start == offset && len == bytes.len() as u64 {
            let count = self.raw.read(offset, bytes)?;
            return if count == bytes.len() { Ok(()) } else { Err(os(libc::EIO)) };
        }
        let mut whole = vec![0; len as usize];
        self.read_past(start, &mut whole)?;
        bytes.copy_from_slice(&whole[(offset - start) as usize..][..bytes.len()]);
        Ok(())
    }

    /// Writes back what is dirty of a range of bytes. It need not be durable then.
    pub(crate) fn settle(&self, bytes: Range<u64>) -> io::Result<()> {
        let blocks = covering(bytes.start, bytes.end);
        change(|| self.device.flush_range(blocks.clone())).map_err(of_write)
    }

    /// Makes durable what was written to it.
    pub(crate) fn sync(&self) -> io::Result<()> {
        if self.has_bug("flush-without-a-sync") {
            return self.settle(0..self.len);
        }
        change(|| but_earlier(self.device.sync())).map_err(of_write)
    }

    /// Makes those bytes durable.
    fn write_through(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset + len;
        if self.has_bug("fua-before-the-write") {
            return Ok(());
        }
        // First without: where there is no room, it is the write that fails, and nothing is lost.
        self.settle(offset..end)?;
        let through = || self.device.write_through(covering(offset, end));
        change(|| but_earlier(through())).map_err(of_write)
    }
}

impl Job {
    /// Blocks. `bytes` is a READ's buffer, or a WRITE's data.
    pub(crate) fn run(&self, bytes: &mut [u8]) -> io::Result<Outcome> {
        let Self { image, work, offset, len } = self;
        let (offset, len) = (*offset, *len);
        let end = offset + len;
        match *work {
            Work::Read => image.read_all(offset, bytes, false)?,
            Work::Upstream { past: false } => {
                image.device.readahead(covering(offset, end)); // all of it at once
                image.read_all(offset, bytes, false)?;
            }
            Work::Upstream { past: true } => match image.settle(offset..end) {
                Ok(()) => image.read_past(offset, bytes)?,
                Err(_) => image.read_all(offset, bytes, true)?, // as below
            },
            Work::Settle => match image.settle(offset..end) {
                Ok(()) => return Ok(Outcome::Settled),
                // What cannot be written back is here, and the rest of them too.
                Err(_) => image.read_all(offset, bytes, true)?,
            },
            Work::Write { done, past, fua } => {
                match past {
                    true => image.write_past(offset, bytes)?,
                    false => image.write(offset + done as u64, &bytes[done..])?,
                }
                if fua {
                    image.write_through(offset, len)?;
                }
            }
            Work::Trim { fua } => {
                let inner = image.inner(offset, end);
                let result = change(|| image.device.discard(inner.clone()));
                if !is_unsupported(&result) {
                    result.map_err(of_write)?;
                    image.zero_ends(offset, len)?;
                }
                if fua {
                    image.sync()?;
                }
            }
            Work::Zeroes { fua, no_hole, fast } => {
                image.zero(image.inner(offset, end), no_hole, fast)?;
                image.zero_ends(offset, len)?;
                if fua {
                    image.sync()?;
                }
            }
            Work::Flush => image.sync()?,
            Work::Map { .. } => return Err(os(libc::EINVAL)), // is no job of this kind
        }
        Ok(Outcome::Done)
    }
}
