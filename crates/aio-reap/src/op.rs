//! What the kernel is asked to do, free of who asked.

use std::os::fd::RawFd;

/// The most bytes Linux moves in one call (`MAX_RW_COUNT`, ABI); longer requests continue as
/// short transfers.
const MAX_TRANSFER: usize = 0x7fff_f000;

/// How [`Engine::allocate`](crate::Engine::allocate) treats a range (`fallocate(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllocateMode {
    /// Reserve space for the range; contents stay, the file grows if it must.
    Reserve,
    /// Give the range back to the file system; it reads as zeros. Never changes the file's size.
    PunchHole,
    /// Make the range read as zeros and keep its space. Never changes the file's size.
    ZeroRange,
}

impl AllocateMode {
    pub(crate) fn flags(self) -> i32 {
        match self {
            Self::Reserve => 0,
            Self::PunchHole => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            Self::ZeroRange => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Nop,
    Read,
    Write,
    Fsync,
    Fdatasync,
    Allocate(AllocateMode),
    WillNeed,
}

/// One operation as a backend sees it: addresses, not owners. Whoever holds an `Op` relies on the
/// slot it came from to keep buffer and file alive until the completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) direct: bool,
    pub(crate) fd: RawFd,
    /// Start of the buffer; null for operations without one.
    pub(crate) ptr: *mut u8,
    /// Bytes of the buffer, or of the range of [`Kind::Allocate`] and [`Kind::WillNeed`].
    pub(crate) len: u64,
    pub(crate) offset: u64,
}

impl Op {
    /// Whether the operation moves bytes between a buffer and the file.
    pub(crate) fn transfers(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Write)
    }

    /// What is left after `done` bytes, cut to what the kernel takes at once.
    pub(crate) fn rest(&self, done: u64) -> Op {
        let mut rest = *self;
        if self.transfers() {
            debug_assert!(done <= self.len);
            // `done <= len`, so the result stays inside the buffer or one past its end.
            rest.ptr = self.ptr.wrapping_add(done as usize);
            rest.len = (self.len - done).min(MAX_TRANSFER as u64);
            rest.offset = self.offset.wrapping_add(done);
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_advances_pointer_length_and_offset_together() {
        let mut bytes = [0u8; 10];
        let op = Op {
            kind: Kind::Read,
            direct: false,
            fd: 0,
            ptr: bytes.as_mut_ptr(),
            len: 10,
            offset: 100,
        };
        let rest = op.rest(3);
        assert_eq!((rest.ptr as usize - op.ptr as usize, rest.len, rest.offset), (3, 7, 103));
        let huge = Op { len: 3 << 30, ..op };
        assert_eq!(huge.rest(0).len, 0x7fff_f000);
        let sync = Op { kind: Kind::Fsync, len: 0, ..op };
        assert_eq!(sync.rest(0).offset, 100);
    }
}
