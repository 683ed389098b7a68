//! The errors of a [`ReadWriteGate`](crate::ReadWriteGate).

use crate::error::impl_error;

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

impl_error! {
    [] GateError {
        Self::WouldBlock => EAGAIN, "the gate is taken or a writer waits for it";
        Self::Deadlock => EDEADLK, "this thread already writes behind the gate";
    }
}
