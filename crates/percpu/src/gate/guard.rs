//! The rights to read and to write behind a gate.
//!
//! Why each may use the value is said by the invariants of the [module above](super).

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::inner::Inner;
use crate::sync::mutant;

/// The right to read what a [`ReadWriteGate`](super::ReadWriteGate) holds; leaves when dropped.
///
/// It may be dropped on another thread, since a reader is a number in whichever CPU's word. If it
/// is forgotten, no writer ever enters.
#[must_use = "dropping the guard leaves at once"]
pub struct ReadGuard<'a, T> {
    gate: &'a Inner<T>,
}

impl<'a, T> ReadGuard<'a, T> {
    /// The guard of a reader that has just entered.
    #[inline]
    pub(super) fn new(gate: &'a Inner<T>) -> Self {
        Self { gate }
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: invariants 1 and 2: this reader is counted, so no writer has the value.
        self.gate.value.with(|value| unsafe { &*value })
    }
}

impl<T> Drop for ReadGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.gate.leave();
    }
}

impl<T: fmt::Debug> fmt::Debug for ReadGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// The right to change what a [`ReadWriteGate`](super::ReadWriteGate) holds; leaves when dropped, also by a panic.
///
/// It stays on its thread, so that a thread that would wait for itself can be told so. If it is
/// forgotten, the gate stays closed for ever: then this thread is told
/// [`GateError::Deadlock`](super::GateError::Deadlock), and others wait; when it has ended, a later
/// thread may be told so in its place (ids are used again).
///
/// ```compile_fail
/// fn send<T: Send>(_: T) {}
/// fn no(guard: percpu::WriteGuard<'static, u32>) {
///     send(guard); // error: cannot be sent between threads safely
/// }
/// ```
#[must_use = "dropping the guard leaves at once"]
pub struct WriteGuard<'a, T> {
    gate: &'a Inner<T>,
    _same_thread: PhantomData<*mut T>,
}

// SAFETY: `&WriteGuard` gives `&T` only.
unsafe impl<T: Sync> Sync for WriteGuard<'_, T> {}

impl<'a, T> WriteGuard<'a, T> {
    /// The guard of the writer, which has just entered on this thread.
    pub(super) fn new(gate: &'a Inner<T>) -> Self {
        Self { gate, _same_thread: PhantomData }
    }

    /// Stops writing and goes on reading, with no writer in between. Readers that waited enter.
    ///
    /// Never waits for anybody who may wait for this thread: it costs what dropping does.
    ///
    /// ```
    /// use percpu::{GateError, ReadWriteGate};
    ///
    /// let routes = ReadWriteGate::new(vec!["default"])?;
    /// let mut writer = routes.write()?;
    /// writer.push("lan");
    /// let reader = writer.downgrade();
    /// assert_eq!((reader.len(), routes.read()?.len()), (2, 2));
    /// assert_eq!(routes.try_write().err(), Some(GateError::WouldBlock));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn downgrade(self) -> ReadGuard<'a, T> {
        let gate = self.gate;
        let reader = ReadGuard { gate };
        if mutant("gate-downgrades-by-leaving-first") {
            drop(self);
            gate.enter_while_closed();
        } else {
            gate.enter_while_closed();
            drop(self);
        }
        reader
    }
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: invariants 1 and 2: nobody else is inside.
        self.gate.value.with(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: invariants 1 and 2: nobody else is inside, and the guard is borrowed mutably.
        self.gate.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        self.gate.leave_writer();
    }
}

impl<T: fmt::Debug> fmt::Debug for WriteGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
