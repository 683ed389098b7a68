//! Open files of an engine.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use offlock_sync::Arc;

use crate::op::Alignment;

/// A file attached to an engine. Clones are cheap.
///
/// The descriptor stays open while a clone or a request in the engine needs it.
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
pub struct File(Rc<SharedFile>);

impl File {
    pub(crate) fn shared(file: SharedFile) -> Self {
        Self(Rc::new(file))
    }

    /// Returns the descriptor, for example to [close](crate::Engine::close) it, if this is the only
    /// clone and no request uses it.
    ///
    /// # Errors
    ///
    /// Returns the file if another clone, a request or a [`SharedFile`] uses it.
    pub fn into_fd(self) -> Result<OwnedFd, Self> {
        let file = Rc::try_unwrap(self.0).map_err(Self)?;
        let inner = Arc::try_unwrap(file.0).map_err(|shared| Self::shared(SharedFile(shared)))?;
        Ok(inner.fd)
    }

    /// Returns the alignment that requests on this file need, if it was opened with `O_DIRECT`.
    pub fn alignment(&self) -> Option<Alignment> {
        self.0.0.direct
    }

    /// Returns whether a transfer has the file's alignment: `address` is the addresses of its buffers
    /// ored together, and `bytes` its offset and their lengths.
    #[inline]
    pub(crate) fn accepts(&self, address: usize, bytes: u64) -> bool {
        self.0.0.direct.is_none_or(|align| align.accepts(address, bytes))
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

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
pub struct SharedFile(Arc<SharedInner>);

/// The state that clones of a file share.
#[derive(Debug)]
struct SharedInner {
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
        Ok(Self(Arc::new(SharedInner { fd, direct })))
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}
