//! The descriptor of a close.

use std::os::fd::{IntoRawFd, OwnedFd};

use crate::error::RequestError;
use crate::reply::Reply;

/// The descriptor that [`Engine::close`](crate::Engine::close) closes. The outcome returns it
/// empty.
///
/// If the request is refused it still has the descriptor, which its drop closes.
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
