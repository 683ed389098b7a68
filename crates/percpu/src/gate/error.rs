//! The errors of a [`ReadWriteGate`](crate::ReadWriteGate).

use std::error::Error;
use std::fmt;
use std::io;

/// The error of a refused entry to a [`ReadWriteGate`](crate::ReadWriteGate).
///
/// ```
/// use offlock_percpu::{GateError, ReadWriteGate};
///
/// let gate = ReadWriteGate::new(0)?;
/// let writer = gate.write()?;
/// assert_eq!(gate.read().err(), Some(GateError::Deadlock)); // on the thread that writes
/// drop(writer);
/// let reader = gate.read()?;
/// assert_eq!(gate.try_write().err(), Some(GateError::WouldBlock));
/// # drop(reader);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GateError {
    /// Another reader or writer is inside or waits. Only the `try_` methods return this; the other
    /// methods wait. Maps to `EAGAIN`.
    WouldBlock,
    /// The calling thread is the writer that the call would wait for. Maps to `EDEADLK`.
    ///
    /// A thread that forgot its [`WriteGuard`](crate::WriteGuard) stays the writer for ever. The
    /// kernel reuses thread ids, so a later thread with the id of an exited writer gets this error
    /// too.
    Deadlock,
}

impl GateError {
    /// Returns the errno of this error: `EAGAIN` or `EDEADLK`.
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
            Self::WouldBlock => f.write_str("the gate is taken or a writer waits for it"),
            Self::Deadlock => f.write_str("this thread already writes behind the gate"),
        }
    }
}

impl Error for GateError {}

impl From<GateError> for io::Error {
    fn from(error: GateError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
