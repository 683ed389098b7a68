//! The errors of a request: why the engine refused it, or why it failed later.

use std::num::NonZeroI32;
use std::{fmt, io};

use thiserror::Error;

/// The reason why an accepted request failed, and the number of bytes that it had transferred
/// before.
///
/// Short transfers are continued, so an error or a cancellation may come after part of the request. The
/// first [`transferred`](Self::transferred) bytes of the buffer are then in the file, or were read.
///
/// `?` converts it to an [`io::Error`], which keeps the reason and drops the count.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let full = engine.attach(std::fs::OpenOptions::new().write(true).open("/dev/full")?)?;
/// let error = engine.write(&full, vec![7; 512], 0).submit()?.wait().0.unwrap_err();
/// assert_eq!((error.errno(), error.transferred()), (libc::ENOSPC, 0));
/// assert_eq!(error.to_string(), "No space left on device (os error 28)");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RequestError {
    errno: NonZeroI32,
    transferred: usize,
}

impl RequestError {
    pub(crate) fn new(errno: NonZeroI32, transferred: usize) -> Self {
        Self { errno, transferred }
    }

    /// Returns the number of bytes that were transferred before the error. They are the first ones
    /// of the buffer, or of the list of buffers.
    ///
    /// The device may have written more of the part that failed. A partial block of an `O_DIRECT`
    /// file does not count.
    pub fn transferred(&self) -> usize {
        self.transferred
    }

    /// Returns the errno.
    pub fn errno(&self) -> i32 {
        self.errno.get()
    }

    fn reason(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno())
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

/// The reason why a request, or a call of another thread, was refused, with the request or the call.
///
/// It is `Send` and `Sync` if the request is. Its [`errno`](Self::errno) is that of the
/// corresponding system call.
///
/// ```
/// use aio_reap::{Engine, SubmitError};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::builder().depth(1).capacity(1).build()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let plug = engine.plug();
/// let first = engine.write(&file, b"first".to_vec(), 0).submit()?;
/// let second = match engine.write(&file, b"second".to_vec(), 5).submit() {
///     Err(SubmitError::Full(request)) => request, // with its buffer
///     _ => unreachable!("there is one slot"),
/// };
/// drop(plug);
/// first.wait().0?;
/// assert_eq!(second.submit()?.wait().0?, 6);
/// # Ok(())
/// # }
/// ```
#[derive(Error)]
#[non_exhaustive]
pub enum SubmitError<R> {
    /// Every slot, or every place for a call of another thread, is taken. Turn the engine and try
    /// again.
    #[error("every slot of the engine is taken")]
    Full(R),
    /// The buffer, the offset or the length is not aligned as the `O_DIRECT` file requires.
    #[error("buffer, offset or length is not aligned as the O_DIRECT file needs")]
    Misaligned(R),
    /// The path has a zero byte.
    #[error("the path has a zero byte")]
    InvalidPath(R),
    /// The engine was shut down.
    #[error("the engine was shut down")]
    Closed(R),
}

impl<R> SubmitError<R> {
    /// Returns the request, to change it or to try again.
    pub fn into_request(self) -> R {
        match self {
            Self::Full(request)
            | Self::Misaligned(request)
            | Self::InvalidPath(request)
            | Self::Closed(request) => request,
        }
    }

    /// Returns `EAGAIN` if the engine was full, `EINVAL` if the request was misaligned or the
    /// path had a zero byte, and `ECANCELED` after shutdown.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Full(_) => libc::EAGAIN,
            Self::Misaligned(_) | Self::InvalidPath(_) => libc::EINVAL,
            Self::Closed(_) => libc::ECANCELED,
        }
    }
}

impl<R> fmt::Debug for SubmitError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SubmitError({self})")
    }
}

impl<R> From<SubmitError<R>> for io::Error {
    fn from(error: SubmitError<R>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// The kernel interface behind an engine.
///
/// ```
/// use aio_reap::{BackendKind, Engine};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::builder().backend(BackendKind::Threads).threads(2).build()?;
/// assert_eq!(engine.backend(), BackendKind::Threads);
/// println!("by default: {}", Engine::new()?.backend()); // for example "io_uring"
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// The io_uring interface.
    Uring,
    /// Linux AIO for `O_DIRECT` files, threads for the rest.
    Aio,
    /// Threads that make blocking system calls.
    Threads,
    /// A device of a test ([`external`](crate::external)).
    #[doc(hidden)]
    External,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uring => "io_uring",
            Self::Aio => "Linux AIO",
            Self::Threads => "threads",
            Self::External => "external",
        })
    }
}

/// A backend that did not start, with the reason.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// for fallback in Engine::new()?.fallbacks() {
///     // For example "io_uring: Operation not permitted (os error 1)" in a container.
///     eprintln!("{} is refused: {}", fallback.backend, fallback.reason);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Error)]
#[error("{backend}: {reason}")]
#[non_exhaustive]
pub struct Fallback {
    /// The backend that was tried.
    pub backend: BackendKind,
    /// The error of the system.
    #[source]
    pub reason: io::Error,
}

/// The reason why no engine was started.
///
/// ```
/// use aio_reap::{Engine, StartError};
///
/// let refused = Engine::builder().depth(8).capacity(4).build();
/// let error = refused.expect_err("a capacity below the depth");
/// assert!(matches!(error, StartError::Limit { name: "capacity", value: 4, least: 8, .. }));
/// assert_eq!(error.to_string(), "capacity is 4, but must be from 8 to 16777216");
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// A limit is out of range.
    #[error("{name} is {value}, but must be from {least} to {most}")]
    Limit {
        /// The name of the limit.
        name: &'static str,
        /// The value that was set.
        value: usize,
        /// The smallest allowed value.
        least: usize,
        /// The largest allowed value.
        most: usize,
    },
    /// Every tried backend was refused. They are in the order of the attempts.
    #[error("no backend could be started: {}", list(.0))]
    Refused(Vec<Fallback>),
    /// The engine's own descriptors could not be created.
    #[error("cannot make the engine's descriptors: {0}")]
    Descriptors(#[source] io::Error),
}

impl StartError {
    /// Returns the errno of the system, for `Refused` that of the last backend.
    pub fn errno(&self) -> i32 {
        let error = match self {
            Self::Limit { .. } => return libc::EINVAL,
            Self::Refused(fallbacks) => fallbacks.last().map(|fallback| &fallback.reason),
            Self::Descriptors(error) => Some(error),
        };
        error.and_then(io::Error::raw_os_error).unwrap_or(libc::EIO)
    }
}

impl From<StartError> for io::Error {
    fn from(error: StartError) -> Self {
        Self::new(Self::from_raw_os_error(error.errno()).kind(), error)
    }
}

fn list(fallbacks: &[Fallback]) -> String {
    fallbacks.iter().map(Fallback::to_string).collect::<Vec<_>>().join("; ")
}
