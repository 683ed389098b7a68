//! Open files that engines of several threads use.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use percpu::sync::Arc;

use crate::alignment::Alignment;

/// An open file for requests of any thread's engine ([`Engine::attach_shared`]). Clones are cheap.
///
/// The descriptor stays open while a clone or a request needs it.
///
/// [`Engine::attach_shared`]: crate::Engine::attach_shared
///
/// ```
/// use aio_reap::{Engine, SharedFile};
/// use std::thread;
///
/// # fn main() -> std::io::Result<()> {
/// let file = SharedFile::new(tempfile::tempfile()?)?;
/// let write = |text: &'static str, at| -> std::io::Result<usize> {
///     let engine = Engine::new()?;
///     Ok(engine.write(&engine.attach_shared(&file), text, at).submit()?.wait().0?)
/// };
/// thread::scope(|scope| scope.spawn(|| write("hello ", 0)).join().unwrap())?;
/// assert_eq!(write("world", 6)?, 5);
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
    pub(crate) fn alignment(&self) -> Option<Alignment> {
        self.0.direct
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}
