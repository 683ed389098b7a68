//! Open files that requests of any thread may use.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use percpu::sync::Arc;

use crate::alignment::Alignment;
use crate::op::Block;

/// An open file for the requests of [`Remote`](crate::Remote)s of any engine. Clones are cheap.
///
/// The descriptor stays open while a clone or a request needs it.
///
/// ```
/// use aio_reap::{Engine, SharedFile};
/// use std::thread;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let remote = engine.remote();
/// let file = SharedFile::new(tempfile::tempfile()?)?;
/// let sender = thread::spawn(move || {
///     let write = remote.write(&file, b"hello".to_vec(), 0).submit()?;
///     Ok::<_, std::io::Error>(write.wait().0?)
/// });
/// engine.serve()?; // until the remote is dropped
/// assert_eq!(sender.join().unwrap()?, 5);
/// # Ok(())
/// # }
/// ```
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
