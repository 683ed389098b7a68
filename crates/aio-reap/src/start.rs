//! The backend of an engine, and the errors of backends that did not start.

use std::fmt;
use std::io;

use thiserror::Error;

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
