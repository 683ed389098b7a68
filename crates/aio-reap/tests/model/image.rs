//! The expected bytes of the file, and the parts of it that requests read or write.

use std::cell::RefCell;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use aio_reap::Alignment;

/// The number of cells. One lock covers a cell.
const CELLS: usize = 70;
/// The bytes in the buffer of a read before it.
pub(super) const FRESH: u8 = 0xee;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Read { zero_fill: bool },
    Write,
    Punch,
    Other,
}

/// The part of the file that a request uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) kind: Kind,
    pub(super) at: usize,
    pub(super) len: usize,
}

impl Access {
    fn cells(&self, cell: usize) -> Range<usize> {
        (self.at / cell).min(CELLS)..(self.at + self.len).div_ceil(cell).min(CELLS)
    }
}

pub(super) struct Image {
    /// The file, to read it without the engine.
    raw: fs::File,
    /// The size of a cell in bytes. On a direct file it is a multiple of the block size.
    pub(super) cell: usize,
    pub(super) is_direct: bool,
    /// The length of the file. Reads go beyond it, and it is not a multiple of the cell size.
    pub(super) len: usize,
    bytes: RefCell<Vec<u8>>,
    /// For each cell, the number of requests that read it, or -1 while one writes it.
    locks: RefCell<Vec<i32>>,
}

impl Image {
    /// Makes a file and opens it for the engine. `direct` asks for `O_DIRECT`: it is the folder of the
    /// file and the number of blocks in a cell. Where `O_DIRECT` does not work, the file is buffered.
    pub(super) fn new(direct: Option<(&Path, usize)>) -> (Self, fs::File) {
        let opened = direct.and_then(|(folder, blocks)| open_direct(folder, blocks));
        let is_direct = opened.is_some();
        let (raw, file, cell) = opened.unwrap_or_else(|| {
            let required = direct.is_some() && std::env::var_os("OFFLOCK_REQUIRE_ALL").is_some();
            assert!(!required, "files without the page cache do not work here");
            let raw = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
            (raw.try_clone().unwrap(), raw, 32)
        });
        let len = 64 * cell - 10;
        let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
        raw.write_all_at(&bytes, 0).unwrap();
        let locks = RefCell::new(vec![0; CELLS]);
        let bytes = RefCell::new(bytes);
        (Self { raw, cell, is_direct, len, bytes, locks }, file)
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut now = vec![0; len];
        self.raw.read_exact_at(&mut now, at as u64).unwrap();
        now
    }

    /// Locks the cells. Returns false if a conflicting request uses one of them.
    pub(super) fn lock(&self, access: &Access) -> bool {
        let mut locks = self.locks.borrow_mut();
        let cells = &mut locks[access.cells(self.cell)];
        let read = matches!(access.kind, Kind::Read { .. });
        let free = cells.iter().all(|&lock| if read { lock >= 0 } else { lock == 0 });
        if free {
            cells.iter_mut().for_each(|lock| *lock += if read { 1 } else { -1 });
        }
        free
    }

    pub(super) fn unlock(&self, access: &Access) {
        let change = match access.kind {
            Kind::Other => return,
            Kind::Read { .. } => -1,
            Kind::Write | Kind::Punch => 1,
        };
        self.locks.borrow_mut()[access.cells(self.cell)]
            .iter_mut()
            .for_each(|lock| *lock += change);
    }

    /// Checks the bytes of a completed request, updates those that it wrote, and unlocks its cells.
    /// `moved` is the number of bytes that it reports, or `None` if it reports none.
    pub(super) fn complete(&self, access: &Access, moved: Option<usize>, bytes: &[u8]) {
        let Access { kind, at, len } = *access;
        let mut image = self.bytes.borrow_mut();
        match (kind, moved) {
            (Kind::Read { zero_fill }, Some(moved)) => {
                let there = len.min(self.len.saturating_sub(at));
                assert_eq!(moved, if zero_fill { len } else { there }, "{access:?}");
                assert!(bytes[..there] == image[at.min(self.len)..][..there], "{access:?}");
                // A direct read may write the whole block at the end of the file.
                if zero_fill || !self.is_direct {
                    let rest = if zero_fill { 0 } else { FRESH };
                    assert!(bytes[there..].iter().all(|&byte| byte == rest), "{access:?}");
                }
            }
            (Kind::Write | Kind::Punch, _) => {
                let now = self.read(at, len);
                let zeros = vec![0; len];
                let new = if kind == Kind::Write { bytes } else { &zeros };
                // A prefix is new, and the rest is as before. All of it is new if the write
                // succeeded.
                let moved_prefix = (0..=len)
                    .rev()
                    .find(|&n| now[..n] == new[..n] && now[n..] == image[at..at + len][n..]);
                let whole = if kind == Kind::Write { len } else { 0 };
                match moved {
                    Some(moved) => {
                        assert_eq!((moved, moved_prefix), (whole, Some(len)), "{access:?}");
                    }
                    None => assert!(moved_prefix.is_some(), "{access:?}"),
                }
                image[at..at + len].copy_from_slice(&now);
            }
            (Kind::Other, Some(moved)) => assert_eq!(moved, 0),
            (Kind::Read { .. } | Kind::Other, None) => {}
        }
        drop(image);
        self.unlock(access);
    }

    /// Checks that a failed request has moved exactly as many bytes as its error reports.
    pub(super) fn check_count(&self, access: &Access, count: usize, bytes: &[u8]) {
        let Access { kind, at, len } = *access;
        let image = self.bytes.borrow();
        match kind {
            Kind::Read { .. } => {
                assert!(bytes[..count] == image[at.min(self.len)..][..count], "{access:?}");
                // Of a direct file a part of a block does not count.
                let rest = self.is_direct || bytes[count..].iter().all(|&byte| byte == FRESH);
                assert!(rest, "{access:?}");
            }
            Kind::Write => {
                let now = self.read(at, len);
                assert!(now[..count] == bytes[..count], "{access:?}");
                let rest = self.is_direct || now[count..] == image[at..at + len][count..];
                assert!(rest, "{access:?}");
            }
            Kind::Punch | Kind::Other => assert_eq!(count, 0, "{access:?}"),
        }
    }

    /// Checks the whole file.
    pub(super) fn check_file(&self) {
        assert!(self.read(0, self.len) == *self.bytes.borrow(), "the file differs from the model");
        assert_eq!(self.raw.metadata().unwrap().len(), self.len as u64);
    }
}

/// Makes a file in `folder` and opens it twice, the second time with `O_DIRECT`. Returns the size of a
/// cell of `blocks` blocks too.
fn open_direct(folder: &Path, blocks: usize) -> Option<(fs::File, fs::File, usize)> {
    let temp = tempfile::NamedTempFile::new_in(folder).unwrap();
    let mut options = fs::File::options();
    let opened = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(temp.path());
    let file = opened.ok()?;
    let cell = blocks * Alignment::of(&file).unwrap()?.offset as usize;
    Some((temp.into_file(), file, cell))
}
