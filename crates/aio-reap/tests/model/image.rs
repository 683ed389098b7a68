//! The expected bytes of the file, and the parts of it that requests read or write.

use std::cell::RefCell;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The size in bytes of the part of the file that one lock covers.
pub(super) const CELL: usize = 32;
const CELLS: usize = 70;
/// The length of the file. Reads go beyond it, and it is not a multiple of the cell size.
pub(super) const FILE_LEN: usize = 64 * CELL - 10;
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
    fn cells(&self) -> Range<usize> {
        (self.at / CELL).min(CELLS)..(self.at + self.len).div_ceil(CELL).min(CELLS)
    }
}

pub(super) struct Image {
    /// The file, to read it without the engine.
    pub(super) raw: fs::File,
    bytes: RefCell<Vec<u8>>,
    /// For each cell, the number of requests that read it, or -1 while one writes it.
    locks: RefCell<Vec<i32>>,
}

impl Image {
    pub(super) fn new() -> Self {
        let raw = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
        let bytes: Vec<u8> = (0..FILE_LEN).map(|at| (at * 7 + at / 251) as u8).collect();
        raw.write_all_at(&bytes, 0).unwrap();
        Self { raw, bytes: RefCell::new(bytes), locks: RefCell::new(vec![0; CELLS]) }
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut now = vec![0; len];
        self.raw.read_exact_at(&mut now, at as u64).unwrap();
        now
    }

    /// Locks the cells. Returns false if a conflicting request uses one of them.
    pub(super) fn lock(&self, access: &Access) -> bool {
        let mut locks = self.locks.borrow_mut();
        let cells = &mut locks[access.cells()];
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
        self.locks.borrow_mut()[access.cells()].iter_mut().for_each(|lock| *lock += change);
    }

    /// Checks the bytes of a completed request, updates those that it wrote, and unlocks its cells.
    /// `moved` is the number of bytes that it reports, or `None` if it reports none.
    pub(super) fn complete(&self, access: &Access, moved: Option<usize>, bytes: &[u8]) {
        let Access { kind, at, len } = *access;
        let mut image = self.bytes.borrow_mut();
        match (kind, moved) {
            (Kind::Read { zero_fill }, Some(moved)) => {
                let there = len.min(FILE_LEN.saturating_sub(at));
                assert_eq!(moved, if zero_fill { len } else { there }, "{access:?}");
                assert!(bytes[..there] == image[at.min(FILE_LEN)..][..there], "{access:?}");
                let rest = if zero_fill { 0 } else { FRESH };
                assert!(bytes[there..].iter().all(|&byte| byte == rest), "{access:?}");
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
                assert!(bytes[..count] == image[at.min(FILE_LEN)..][..count], "{access:?}");
                assert!(bytes[count..].iter().all(|&byte| byte == FRESH), "{access:?}");
            }
            Kind::Write => {
                let now = self.read(at, len);
                assert!(now[..count] == bytes[..count], "{access:?}");
                assert!(now[count..] == image[at..at + len][count..], "{access:?}");
            }
            Kind::Punch | Kind::Other => assert_eq!(count, 0, "{access:?}"),
        }
    }

    /// Checks the whole file.
    pub(super) fn check_file(&self) {
        assert!(self.read(0, FILE_LEN) == *self.bytes.borrow(), "the file differs from the model");
        assert_eq!(self.raw.metadata().unwrap().len(), FILE_LEN as u64);
    }
}
