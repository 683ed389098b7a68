//! Open files that requests of any thread may use.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use percpu::sync::Arc;

use crate::alignment::Alignment;
use crate::op::Block;

/// An open file for the requests of [`Remote`](crate::Remote)s of any engine. Clones are cheap.
///
/// The descriptor stays open while a clone or a request needs it.
#[derive(Clone, Debug)]
pub struct SharedFile(Arc<Inner>);

/// The state that clones of a file share.
#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    /// `Some` for a file opened with `O_DIRECT`.
    direct: Option<Alignment>,
}

impl SharedFile {
    /// Shares an open file. Allocates.
    ///
    /// # Errors
    ///
    /// Returns the error of `fcntl` if the descriptor is not open.
    pub fn new(fd: impl Into<OwnedFd>) -> io::Result<Self> {
        let fd = fd.into();
        let direct = Alignment::of(&fd)?;
        Ok(Self(Arc::new(Inner { fd, direct })))
    }

    /// Returns the alignment that requests on this file need, if it was opened with `O_DIRECT`.
    pub fn alignment(&self) -> Option<Alignment> {
        self.0.direct
    }

    pub(crate) fn block(&self) -> Block {
        Block::of(self.0.direct)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.fd.as_raw_fd()
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}
