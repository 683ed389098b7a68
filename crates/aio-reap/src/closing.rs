//! The descriptor of a close.

use std::os::fd::{IntoRawFd, OwnedFd};

use crate::error::RequestError;
use crate::reply::Reply;

/// The descriptor that [`Engine::close`](crate::Engine::close) closes. The outcome returns it
/// empty.
///
/// If the request is refused it still has the descriptor, which its drop closes.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::builder().depth(1).capacity(1).build()?;
/// let nop = engine.nop().submit()?; // takes the only slot
/// let refused = engine.close(std::fs::File::open("/")?).submit().unwrap_err();
/// let fd = refused.into_request().into_buf().into_inner().expect("it is still open");
/// nop.wait().0?;
/// let (closed, fd) = engine.close(fd).submit()?.wait();
/// closed?;
/// assert!(fd.into_inner().is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ClosingFd(Option<OwnedFd>);

impl ClosingFd {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }

    /// Returns the descriptor, or `None` if the kernel has closed it.
    pub fn into_inner(self) -> Option<OwnedFd> {
        self.0
    }
}

impl Reply<ClosingFd> for () {
    /// The kernel has closed the descriptor, also with an error.
    unsafe fn from_kernel(
        result: Result<usize, RequestError>,
        fd: &mut ClosingFd,
    ) -> Result<Self, RequestError> {
        let _closed = fd.0.take().map(OwnedFd::into_raw_fd);
        result.map(drop)
    }
}
