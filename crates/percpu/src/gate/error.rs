//! Why a thread was not let in.

use std::error::Error;
use std::fmt;
use std::io;

/// Why [`ReadWriteGate`](crate::ReadWriteGate) let a thread not in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GateError {
    /// Others are inside, or wait for their turn. Only the `try_` methods say so: the others wait.
    /// Maps to `EAGAIN`.
    WouldBlock,
    /// This thread is the writer it would wait for; or that one forgot its guard and ended, and this
    /// thread has its id now: it would wait for ever. Maps to `EDEADLK`.
    Deadlock,
}

impl GateError {
    /// The error as C knows it: `EAGAIN` or `EDEADLK`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::WouldBlock => libc::EAGAIN,
            Self::Deadlock => libc::EDEADLK,
        }
    }
}

impl fmt::Display for GateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WouldBlock => f.write_str("others are behind the gate"),
            Self::Deadlock => f.write_str("this thread is writing behind the gate"),
        }
    }
}

impl Error for GateError {}

impl From<GateError> for io::Error {
    fn from(error: GateError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
