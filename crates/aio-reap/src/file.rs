//! Open files of an engine.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use crate::alignment::Alignment;
use crate::op::Op;
use crate::registry::{Registration, Registry};

/// A file attached to an engine. Clones are cheap.
///
/// The descriptor stays open while a clone or a request in the engine needs it. The kernel keeps a
/// registered file open until the engine's next turn after that.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let write = engine.write(&file, b"hello".to_vec(), 0).submit()?;
/// drop(file); // the descriptor stays open until the write completes
/// assert_eq!(write.wait().0?, 5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct File(Rc<Inner>);

/// The state that clones of a file share.
#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    /// `Some` for a file opened with `O_DIRECT`.
    direct: Option<Alignment>,
    /// The number of the file in the engine that it was registered with.
    registration: Option<Registration>,
}

impl File {
    pub(crate) fn new(fd: OwnedFd, registration: Option<Registration>) -> io::Result<Self> {
        let direct = Alignment::of(&fd)?;
        Ok(Self(Rc::new(Inner { fd, direct, registration })))
    }

    /// Returns whether the file is registered with the kernel interface of an engine
    /// ([`Engine::attach_registered`](crate::Engine::attach_registered)).
    pub fn is_registered(&self) -> bool {
        self.0.registration.is_some()
    }

    /// Returns [`Op::fd`] of this file for requests of the engine that has this registry.
    pub(crate) fn op_fd(&self, registry: &Rc<Registry>) -> RawFd {
        let number = self.0.registration.as_ref().and_then(|known| known.number_in(registry));
        number.map_or(self.0.fd.as_raw_fd(), |number| !RawFd::from(number))
    }

    /// Returns the alignment that requests on this file need, if it was opened with `O_DIRECT`.
    pub fn alignment(&self) -> Option<Alignment> {
        self.0.direct
    }

    /// Returns whether `op` has the file's alignment. Always true for vectors, which the engine
    /// checks when it makes the request.
    pub(crate) fn accepts(&self, op: &Op) -> bool {
        self.0.direct.is_none_or(|align| op.is_aligned(align))
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}
