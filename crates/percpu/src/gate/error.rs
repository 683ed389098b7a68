//! Why a thread was not let in.

use std::error::Error;
use std::fmt;
use std::io;

use crate::error::Forked;

/// Why [`ReadWriteGate`](crate::ReadWriteGate) refused to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GateError {
    /// This thread is the writer it would wait for. Maps to `EDEADLK`.
    Deadlock,
    /// It would wait for a thread of the process that forked this one. Maps to `EOWNERDEAD`.
    Forked(Forked),
}

impl GateError {
    /// The error as C knows it: `EDEADLK` or `EOWNERDEAD`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Deadlock => libc::EDEADLK,
            Self::Forked(forked) => forked.errno(),
        }
    }
}

impl fmt::Display for GateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadlock => f.write_str("this thread is writing behind the gate"),
            Self::Forked(forked) => forked.fmt(f),
        }
    }
}

impl Error for GateError {}

impl From<Forked> for GateError {
    fn from(forked: Forked) -> Self {
        Self::Forked(forked)
    }
}

impl From<GateError> for io::Error {
    fn from(error: GateError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
