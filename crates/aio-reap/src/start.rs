//! The backend of an engine, and the errors of backends that did not start.

use std::fmt;
use std::io;

use thiserror::Error;

/// The kernel interface behind an engine.
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
