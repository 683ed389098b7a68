//! What a request becomes where its image is cached: an answer at once, a job for a hand, or an operation
//! of the engine.
//!
//! See [`blocks`](crate::blocks) for the whole, and for why each of them is right.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aio_reap::AlignedBuf;
use bufcache::{GetError, WriteError};
use nbd_protocol::{Command, Request};

use crate::blocks::{BLOCK, Blocks, Image, covering};
use crate::memory::ALIGN;

/// A job goes on asking for a block that others have for so long. A guess: longer than a disk takes for
/// anything.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest run of zeros written at once where the file system cannot make them.
const ZEROS: usize = 1 << 20;

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
}

/// A request that a hand works on.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) image: Arc<Image>,
    pub(crate) work: Work,
    pub(crate) offset: u64,
    pub(crate) len: u32,
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
                let blocks = covering(offset, offset + u64::from(len));
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

    /// Writes to the cache; what finds no buffer, to the image.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        for piece in self.pieces(offset, bytes.len()) {
            let part = &bytes[done..][..piece.count];
            let write = |into: &mut [u8]| into.copy_from_slice(part);
            match self.change(piece, write) {
                Err(GetError::NoFreeBuffers) if piece.whole => {
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
    fn zero_ends(&self, offset: u64, len: u32) -> io::Result<()> {
        let inner = self.inner(offset, offset + u64::from(len));
        let ends = self.pieces(offset, len as usize).filter(|piece| !inner.contains(&piece.block));
        for piece in ends {
            self.change(piece, |bytes| bytes.fill(0)).map_err(of_get)?;
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
        let zeros = AlignedBuf::zeroed(ZEROS, ALIGN);
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
                    let mut there = AlignedBuf::zeroed(BLOCK, ALIGN);
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
    fn write_through(&self, offset: u64, len: u32) -> io::Result<()> {
        let end = offset + u64::from(len);
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
        let end = offset + u64::from(len);
        match *work {
            Work::Read => image.read_all(offset, bytes, false)?,
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
        }
        Ok(Outcome::Done)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use bufcache::{BlockDevice, Fault, FaultDevice, FileDevice, Operation};
    use nbd_protocol::CommandFlags;

    use super::*;

    type Faulty = Arc<FaultDevice<FileDevice>>;

    const FLUSH: Command = Command::Flush;

    fn write(fua: bool) -> Command {
        Command::Write { fua }
    }

    fn zeroes(fua: bool, no_hole: bool, fast: bool) -> Command {
        Command::WriteZeroes { fua, no_hole, fast }
    }

    /// An image behind a cache of so many bytes, and what it should hold.
    struct Lab {
        file: File,
        disk: Faulty,
        blocks: Blocks,
        model: Vec<u8>,
    }

    impl Lab {
        fn new(len: usize, cache: u64) -> Self {
            let file = tempfile::tempfile().unwrap();
            file.set_len(len as u64).unwrap();
            let device = FileDevice::new(file.try_clone().unwrap()).unwrap();
            let disk = Arc::new(FaultDevice::new(device));
            let raw: Arc<dyn BlockDevice> = disk.clone();
            let files = [file.try_clone().unwrap()];
            let blocks = Blocks::on(cache, (&files, 1), |_| Ok(Arc::clone(&raw))).unwrap();
            Self { file, disk, blocks, model: vec![0; len] }
        }

        /// As the server does, but that it waits for the hand, and for the engine.
        fn run(&self, command: Command, offset: u64, bytes: &mut [u8], len: u32) -> io::Result<()> {
            let (flags, cookie) = (CommandFlags::NONE, 0);
            let request = Request { flags, command: 0, cookie, offset, len };
            let image = Arc::clone(self.blocks.image(0).unwrap());
            let read_file = |bytes: &mut [u8]| self.file.read_exact_at(bytes, offset);
            match self.blocks.begin(0, command, &request, bytes) {
                Way::Answer(result) => result,
                Way::Engine => read_file(bytes),
                Way::Hand(work) => match (Job { image, work, offset, len }).run(bytes)? {
                    Outcome::Done => Ok(()),
                    Outcome::Settled => read_file(bytes),
                },
            }
        }

        fn write(&mut self, offset: usize, len: usize, byte: u8, fua: bool) -> io::Result<()> {
            self.run(write(fua), offset as u64, &mut vec![byte; len], len as u32)?;
            self.model[offset..offset + len].fill(byte);
            Ok(())
        }

        fn zero(&mut self, command: Command, offset: usize, len: usize) -> io::Result<()> {
            self.run(command, offset as u64, &mut [], len as u32)?;
            self.model[offset..offset + len].fill(0);
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            self.run(FLUSH, 0, &mut [], 0)
        }

        fn read(&self, offset: usize, len: usize) -> io::Result<Vec<u8>> {
            let mut bytes = vec![0xff; len];
            self.run(Command::Read { df: false }, offset as u64, &mut bytes, len as u32)?;
            Ok(bytes)
        }

        #[track_caller]
        fn check(&self, offset: usize, len: usize) {
            let found = self.read(offset, len).unwrap();
            assert!(found == self.model[offset..offset + len], "{offset}, {len}");
        }

        fn on_disk(&self) -> Vec<u8> {
            let mut bytes = vec![0; self.model.len()];
            self.file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        }
    }

    #[test]
    fn anything_at_any_place_is_what_a_plain_image_would_have() {
        const LEN: usize = 40 * BLOCK + 1000;
        for (seed, cache) in [(1, 4 * BLOCK), (2, 8 * BLOCK), (3, 1 << 20), (4, 1 << 20)] {
            let mut lab = Lab::new(LEN, cache as u64);
            // Where the file system cannot, TRIM leaves it as it is.
            let trims = lab.disk.inner().discard(0, BLOCK as u64).is_ok();
            let mut state = seed as u64;
            let mut random = |below: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) as usize % below
            };
            for round in 0..600 {
                let offset = random(LEN - 1);
                let most = [64, BLOCK + 1, 8 * BLOCK, LEN][random(4)];
                let mut len = 1 + random(most.min(LEN - offset));
                if random(4) == 0 {
                    len = (LEN - offset).min(most); // often the end
                }
                let (offset, len) = match random(2) {
                    0 => (offset, len),
                    _ => (offset / BLOCK * BLOCK, len.div_ceil(BLOCK) * BLOCK),
                };
                let len = len.min(LEN - offset);
                let fua = random(16) == 0;
                match random(10) {
                    0..=3 => lab.write(offset, len, round as u8, fua).unwrap(),
                    4 => lab.zero(zeroes(fua, random(2) == 0, false), offset, len).unwrap(),
                    5 if trims => lab.zero(Command::Trim { fua }, offset, len).unwrap(),
                    6 if random(4) == 0 => lab.flush().unwrap(),
                    _ => lab.check(offset, len),
                }
            }
            lab.check(0, LEN);
            lab.flush().unwrap();
            assert!(lab.on_disk() == lab.model);
        }
    }

    #[test]
    fn what_fits_is_written_without_the_image_and_what_is_long_past_the_cache() {
        let mut lab = Lab::new(64 * BLOCK, 1 << 20);
        lab.write(0, BLOCK, 7, false).unwrap();
        assert_eq!(lab.disk.count(Operation::Write), 0);
        lab.check(0, BLOCK);
        lab.write(100, 10, 8, false).unwrap(); // it is there
        lab.check(0, BLOCK);
        assert_eq!((lab.disk.count(Operation::Write), lab.disk.count(Operation::Read)), (0, 0));
        lab.write(1000, 40 * BLOCK, 9, false).unwrap();
        assert!(lab.on_disk()[2 * BLOCK] == 9 && lab.disk.count(Operation::Write) == 1);
        lab.check(0, 64 * BLOCK);
        lab.flush().unwrap();
        assert!(lab.on_disk() == lab.model && lab.disk.count(Operation::Sync) == 1);
    }

    #[test]
    fn a_full_disk_is_told_and_forgets_nothing() {
        let mut lab = Lab::new(64 * BLOCK, 16 * BLOCK as u64);
        let len = 2 * BLOCK;
        lab.write(0, len, 7, false).unwrap();
        lab.disk.inject(Operation::Write, .., Fault::Error(libc::ENOSPC));
        let errno = |result: io::Result<()>| result.unwrap_err().raw_os_error().unwrap();
        assert_eq!(errno(lab.flush()), libc::ENOSPC);
        lab.check(0, len);
        // Nor does FUA make more of it than that.
        assert_eq!(errno(lab.write(0, BLOCK, 8, true)), libc::ENOSPC);
        lab.model[..BLOCK].fill(8); // in the cache, not durable
        lab.check(0, len);
        // A long read meets what cannot be written back.
        lab.check(0, 40 * BLOCK);
        // Once all is dirty who writes hears of it as well.
        let told = (0..32).find_map(|at| lab.write(2 * at * BLOCK, len, at as u8, false).err());
        assert_eq!(told.unwrap().raw_os_error(), Some(libc::ENOSPC));
        lab.disk.heal();
        lab.flush().unwrap();
        lab.write(0, BLOCK, 9, true).unwrap();
        assert!(lab.on_disk()[..BLOCK].iter().all(|byte| *byte == 9));
    }

    #[test]
    fn a_failed_sync_is_remembered_and_what_is_lost_is_not_read() {
        for fua in [false, true] {
            let mut lab = Lab::new(64 * BLOCK, 1 << 20);
            lab.write(0, BLOCK, 7, false).unwrap();
            lab.flush().unwrap();
            lab.write(BLOCK, BLOCK, 8, false).unwrap();
            lab.write(40 * BLOCK, 20 * BLOCK, 9, false).unwrap(); // past the cache
            lab.disk.inject_next(Operation::Sync, Fault::Error(libc::ENOSPC));
            let eio = |result: io::Result<()>| {
                assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO));
            };
            eio(if fua { lab.write(0, 10, 7, true) } else { lab.flush() });
            eio(lab.flush());
            for offset in [0, 2] {
                eio(lab.write(offset * BLOCK, BLOCK, 1, false));
                eio(lab.write(offset * BLOCK, 20 * BLOCK, 1, false));
                eio(lab.zero(Command::Trim { fua: false }, offset * BLOCK, BLOCK));
                eio(lab.zero(zeroes(false, true, false), offset * BLOCK, BLOCK));
            }
            lab.check(0, 2 * BLOCK); // cached
            lab.check(30 * BLOCK, BLOCK); // never written
            eio(lab.read(41 * BLOCK, BLOCK).map(drop));
            eio(lab.read(20 * BLOCK, 40 * BLOCK).map(drop));
            assert_eq!(lab.disk.count(Operation::Sync), 2, "and not once more");
        }
    }

    #[test]
    fn what_the_file_system_cannot_do_is_written_or_left() {
        let mut lab = Lab::new(64 * BLOCK + 10, 1 << 20);
        let not_there = Fault::Error(libc::EOPNOTSUPP);
        for operation in [Operation::Discard, Operation::Zero] {
            lab.disk.inject(operation, .., not_there);
        }
        lab.write(0, 64 * BLOCK, 7, false).unwrap();
        lab.write(5, 64 * BLOCK, 8, false).unwrap();
        // TRIM may do nothing.
        let trim = |fua| Command::Trim { fua };
        lab.run(trim(true), 10, &mut [], 5 * BLOCK as u32).unwrap();
        lab.check(0, 64 * BLOCK + 10);
        for no_hole in [false, true] {
            let fast = lab.zero(zeroes(false, no_hole, true), 10, 5 * BLOCK);
            assert_eq!(fast.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
            lab.check(0, 64 * BLOCK + 10);
            lab.zero(zeroes(true, no_hole, false), 10 + BLOCK, 50 * BLOCK).unwrap();
            lab.check(0, 64 * BLOCK + 10);
        }
        lab.zero(zeroes(false, true, false), 0, 64 * BLOCK + 10).unwrap();
        lab.flush().unwrap();
        assert!(lab.on_disk() == lab.model);
    }

    #[test]
    fn what_the_disk_refuses_changes_nothing_that_was_written_before() {
        let mut lab = Lab::new(64 * BLOCK, 1 << 20);
        lab.write(0, 4 * BLOCK, 7, false).unwrap();
        let refusals = [
            (Operation::Discard, Command::Trim { fua: false }),
            (Operation::Discard, zeroes(false, false, false)),
            (Operation::Zero, zeroes(false, true, false)),
        ];
        for (operation, command) in refusals {
            for fault in [Fault::Error(libc::EIO), Fault::Panic] {
                lab.disk.inject_next(operation, fault);
                lab.zero(command, 0, 2 * BLOCK).unwrap_err();
                lab.check(0, 64 * BLOCK);
            }
        }
        lab.disk.inject_next(Operation::Write, Fault::Error(libc::EIO));
        lab.write(0, 30 * BLOCK, 8, false).unwrap_err();
        lab.check(0, 4 * BLOCK);
        lab.flush().unwrap();
    }
}
