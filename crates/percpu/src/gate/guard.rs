//! The guards of a gate.
//!
//! The invariants are those of the [module above](super).

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::inner::Inner;
use crate::sync::step;

/// Shared access to the value of a [`ReadWriteGate`](super::ReadWriteGate); leaves when dropped.
///
/// The guard may be dropped on another thread, because a reader is only a count in the word of some
/// CPU. A forgotten guard keeps every writer out for ever.
///
/// ```
/// use offlock_percpu::{ReadGuard, ReadWriteGate};
///
/// fn longest<'g>(names: &ReadGuard<'g, Vec<&'static str>>) -> usize {
///     names.iter().map(|name| name.len()).max().unwrap_or(0)
/// }
///
/// let names = ReadWriteGate::new(vec!["lo", "eth0"])?;
/// let reader = names.read()?;
/// std::thread::scope(|scope| {
///     scope.spawn(move || assert_eq!(longest(&reader), 4)); // leaves on the other thread
/// });
/// assert!(names.try_write().is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping the guard leaves at once"]
pub struct ReadGuard<'a, T> {
    gate: &'a Inner<T>,
}

impl<'a, T> ReadGuard<'a, T> {
    /// Creates the guard of a reader that has just entered.
    #[inline]
    pub(super) fn new(gate: &'a Inner<T>) -> Self {
        Self { gate }
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this reader is counted, so by invariants 1 and 2 no writer is inside.
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

/// Exclusive access to the value of a [`ReadWriteGate`](super::ReadWriteGate); leaves when dropped,
/// also by a panic.
///
/// The guard is `!Send`, so that the gate can detect a thread that would wait for itself. A
/// forgotten guard keeps the gate closed for ever.
///
/// ```
/// use offlock_percpu::{ReadWriteGate, WriteGuard};
///
/// fn add_default(mut routes: WriteGuard<'_, Vec<&'static str>>) {
///     routes.push("default");
/// }
///
/// let routes = ReadWriteGate::new(Vec::new())?;
/// add_default(routes.write()?);
/// assert_eq!(*routes.read()?, ["default"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping the guard leaves at once"]
pub struct WriteGuard<'a, T> {
    gate: &'a Inner<T>,
    _same_thread: PhantomData<*mut T>,
}

// SAFETY: a shared `WriteGuard` only gives out `&T`, for which `T: Sync` suffices.
unsafe impl<T: Sync> Sync for WriteGuard<'_, T> {}

impl<'a, T> WriteGuard<'a, T> {
    /// Creates the guard of the writer, which has just entered on the calling thread.
    pub(super) fn new(gate: &'a Inner<T>) -> Self {
        Self { gate, _same_thread: PhantomData }
    }

    /// Turns the writer into a reader, with no other writer in between, and admits the readers that
    /// wait.
    ///
    /// Does not wait for readers or writers; costs as much as dropping the guard.
    ///
    /// ```
    /// use offlock_percpu::{GateError, ReadWriteGate};
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
        step!("downgrade: enter before the writer leaves", gate.enter_while_closed());
        drop(self);
        reader
    }
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the writer's, so by invariants 1 and 2 no reader is inside.
        self.gate.value.with(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the writer's, so by invariants 1 and 2 no reader is inside; `&mut
        // self` excludes other references.
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
