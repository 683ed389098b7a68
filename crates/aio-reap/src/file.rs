//! An open file as the engine knows it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use crate::alignment::Alignment;
use crate::op::Op;
use crate::registry::{Registration, Registry};

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
    pub(crate) fn op_fd(&self, registry: &Rc<Registry>) -> RawFd {
        let number = self.0.registration.as_ref().and_then(|known| known.number_in(registry));
        number.map_or(self.0.fd.as_raw_fd(), |number| !RawFd::from(number))
    }

    /// What a request on this file must be aligned to, if it was opened with `O_DIRECT`.
    pub fn alignment(&self) -> Option<Alignment> {
        self.0.direct
    }

    /// Whether `op` meets the file's alignment. Whoever makes vectors looks at each.
    pub(crate) fn accepts(&self, op: &Op) -> bool {
        self.0.direct.is_none_or(|align| op.is_aligned(align))
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}
