//! Why a request that the engine had accepted failed, and why one was refused.

use std::fmt;
use std::io;
use std::num::NonZeroI32;

use thiserror::Error;

/// Why a request failed, and how many bytes it had transferred before.
///
/// A write goes on after a short one, so its error may come after part of it is written; so may a
/// read's, a cancellation and the end of the file of a read that must be exact. The first
/// [`transferred`](Self::transferred) bytes of the buffer are then in the file, or were read.
///
/// It becomes an [`io::Error`] by `?`, which keeps the reason and drops the count.
///
/// ```
/// use aio_reap::Engine;
/// use aio_reap::scripted::{Script, Transfer};
///
/// # fn main() -> std::io::Result<()> {
/// let script = Script::new();
/// let engine = Engine::builder().build_scripted(&script)?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// // A device that takes 511 bytes, and then says EFBIG.
/// script.on_transfer(Transfer::Short(511));
/// script.on_transfer(Transfer::Fail(27));
/// let (written, _buf) = engine.write(&file, vec![7; 1024], 0).submit()?.wait();
/// let error = written.unwrap_err();
/// assert_eq!((error.errno(), error.transferred()), (27, 511));
/// assert_eq!(error.to_string(), "File too large (os error 27), after 511 bytes");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RequestError {
    /// An errno, or [`END_OF_FILE`](Self::END_OF_FILE).
    reason: NonZeroI32,
    transferred: usize,
}

impl RequestError {
    /// Stands for [`UnexpectedEof`](std::io::ErrorKind::UnexpectedEof), which has no errno.
    pub(crate) const END_OF_FILE: NonZeroI32 = NonZeroI32::new(-1).unwrap();

    pub(crate) fn new(reason: NonZeroI32, transferred: usize) -> Self {
        Self { reason, transferred }
    }

    /// How many bytes were transferred before the error: the first ones of the buffer, or of a list
    /// of buffers.
    ///
    /// The device may have written more of the part that failed, and for an `O_DIRECT` file less
    /// than a block does not count. Zero for a remote request whose engine was dropped during a
    /// panic.
    pub fn transferred(&self) -> usize {
        self.transferred
    }

    /// The errno; `None` at the end of the file, which has none, as for an [`io::Error`].
    pub fn raw_os_error(&self) -> Option<i32> {
        (self.reason != Self::END_OF_FILE).then_some(self.reason.get())
    }

    /// The errno; `EIO` at the end of the file.
    pub fn errno(&self) -> i32 {
        self.raw_os_error().unwrap_or(libc::EIO)
    }

    /// The kind of the [`io::Error`] that it becomes.
    pub fn kind(&self) -> io::ErrorKind {
        self.reason().kind()
    }

    fn reason(&self) -> io::Error {
        match self.raw_os_error() {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::ErrorKind::UnexpectedEof.into(),
        }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.transferred {
            0 => self.reason().fmt(f),
            count => write!(f, "{}, after {count} bytes", self.reason()),
        }
    }
}

impl fmt::Debug for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("RequestError");
        fields.field("reason", &self.reason()).field("transferred", &self.transferred).finish()
    }
}

impl std::error::Error for RequestError {}

impl From<RequestError> for io::Error {
    fn from(error: RequestError) -> Self {
        error.reason()
    }
}

/// Why a request was refused; it holds the request.
///
/// `Send` and `Sync` when the request is. Its [`errno`](Self::errno) is what the system call would
/// have said.
#[derive(Error)]
#[non_exhaustive]
pub enum SubmitError<R> {
    /// Every slot is taken; turn the engine and try again.
    #[error("every slot of the engine is taken")]
    Full(R),
    /// Buffer, offset or length does not fit an `O_DIRECT` file.
    #[error("buffer, offset or length is not aligned as the O_DIRECT file needs")]
    Misaligned(R),
    /// The engine was shut down.
    #[error("the engine was shut down")]
    Closed(R),
}

impl<R> SubmitError<R> {
    /// The request, to change or to try again.
    pub fn into_request(self) -> R {
        match self {
            Self::Full(request) | Self::Misaligned(request) | Self::Closed(request) => request,
        }
    }

    /// `EAGAIN` when full, `EINVAL` when misaligned, `ECANCELED` after shutdown.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Full(_) => libc::EAGAIN,
            Self::Misaligned(_) => libc::EINVAL,
            Self::Closed(_) => libc::ECANCELED,
        }
    }
}

impl<R> fmt::Debug for SubmitError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "Full(..)",
            Self::Misaligned(_) => "Misaligned(..)",
            Self::Closed(_) => "Closed(..)",
        })
    }
}

impl<R> From<SubmitError<R>> for io::Error {
    fn from(error: SubmitError<R>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
