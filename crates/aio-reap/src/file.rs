//! An open file as the engine knows it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use crate::buf_list::Shape;
use crate::op::Op;
use crate::registry::{Registration, Registry};
use crate::sys;

/// A file attached to an engine; cheap to clone.
///
/// The descriptor stays open while a clone or a request in the engine needs it, and what it refers
/// to until the engine's next turn if it was registered.
#[derive(Clone, Debug)]
pub struct File(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    /// `Some` for a file opened with `O_DIRECT`.
    direct: Option<Alignment>,
    /// Its number in the engine that it was registered with.
    registration: Option<Registration>,
}

/// What `O_DIRECT` asks of a request, in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Alignment {
    /// Of the buffer's address.
    pub memory: u32,
    /// Of the offset and the length.
    pub offset: u32,
}

impl File {
    pub(crate) fn new(fd: OwnedFd, registration: Option<Registration>) -> io::Result<Self> {
        let direct = Alignment::of(&fd)?;
        Ok(Self(Rc::new(Inner { fd, direct, registration })))
    }

    /// Whether an engine's kernel knows the file by number
    /// ([`Engine::attach_registered`](crate::Engine::attach_registered)).
    pub fn is_registered(&self) -> bool {
        self.0.registration.is_some()
    }

    /// What a request of the engine with this registry calls the file: [`Op::fd`].
    pub(crate) fn target(&self, registry: &Rc<Registry>) -> RawFd {
        let number = self.0.registration.as_ref().and_then(|known| known.number_in(registry));
        number.map_or(self.0.fd.as_raw_fd(), |number| !RawFd::from(number))
    }

    /// What a request on this file must be aligned to, if it was opened with `O_DIRECT`.
    pub fn alignment(&self) -> Option<Alignment> {
        self.0.direct
    }

    /// Whether `op` meets the file's alignment. Whoever makes vectors looks at each.
    pub(crate) fn accepts(&self, op: &Op) -> bool {
        self.0.direct.is_none_or(|align| align.accepts(op))
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl Alignment {
    /// What the open file `fd` asks of requests; `None` unless it was opened with `O_DIRECT`.
    ///
    /// # Errors
    ///
    /// The system call's error when the flags cannot be read.
    pub fn of(fd: impl AsFd) -> io::Result<Option<Self>> {
        let fd = fd.as_fd();
        // SAFETY: no pointers.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
        let flags = sys::check(flags.into())? as i32;
        Ok((flags & libc::O_DIRECT != 0).then(|| Self::ask(fd)))
    }

    /// Whether `op` is aligned as this; of vectors, [`accepts_vectors`](Self::accepts_vectors) says.
    pub(crate) fn accepts(self, op: &Op) -> bool {
        !op.transfers()
            || op.memory.is_vectors()
            || ((op.ptr as usize).is_multiple_of(self.memory as usize)
                && (op.offset | op.len).is_multiple_of(self.offset.into()))
    }

    /// Whether each buffer of a list is aligned as this, and `offset`.
    pub(crate) fn accepts_vectors(self, shape: &Shape, offset: u64) -> bool {
        shape.addresses.is_multiple_of(self.memory as usize)
            && (offset | shape.lengths).is_multiple_of(self.offset.into())
    }

    /// Asks the kernel: `statx` where it knows (6.1), the sector size of a block device, else 512
    /// bytes, the least any Linux file system accepts (the kernel then refuses what is wrong).
    fn ask(fd: BorrowedFd<'_>) -> Self {
        let (memory, offset) = sys::direct_alignment(fd).unwrap_or_default();
        if memory.is_power_of_two() && offset.is_power_of_two() {
            return Self { memory, offset };
        }
        let mut sector: libc::c_int = 0;
        // SAFETY: BLKSSZGET stores one int; on other files it fails and stores nothing.
        let ret = unsafe { libc::ioctl(fd.as_raw_fd(), libc::BLKSSZGET, &raw mut sector) };
        let sector = if ret == 0 && sector > 0 { sector as u32 } else { 512 };
        Self { memory: sector, offset: sector }
    }
}
