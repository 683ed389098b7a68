//! A read-write lock whose readers count per CPU, so that readers write no shared cache line.
//!
//! A reader adds one to the word of its CPU when it enters, and subtracts one from the word of the
//! CPU on which it leaves. A writer closes the gate and waits until the words sum to 0.
//!
//! ```text
//!   reader                                   writer
//!   section: gate = 0? word[cpu] += 1        under `state`: owner = me; gate = me
//!   ...reads...                              heavy_rseq()   no reader enters after this
//!   section: word[cpu] -= 1                  while sum(words) != 0 { wait }
//!   light()                                  ...writes...
//!   gate != 0? wake the writer               under `state`: owner = 0; gate = 0; wake
//! ```
//!
//! The design is that of the Linux kernel's percpu-rwsem (`kernel/locking/percpu-rwsem.c`, 3.8).
//! The rseq section and its barrier take the place of disabled preemption and of the grace period.
//! Where no sections run, readers use compare-exchanges, and the lowest bit of a word says that it
//! is closed. A thread without a CPU id does the same with an additional word, `remote`.
//!
//! # Invariants
//!
//! 1. No reader enters while the gate is closed: a section commits an entry only while `gate` is 0,
//!    and a compare-exchange only from a value without `CLOSED`. When `close` returns, no entry
//!    that began earlier can still commit.
//! 2. After `close` the words only fall, until `downgrade` counts the writer as a reader. So a sum
//!    of 0, read word by word in any order, means that no reader is inside: each word was, when it
//!    was read, at least what it is at the end of the walk.
//! 3. `owner` and `gate` change only under `state`. Whenever `state` is free, both are the id of
//!    the thread that closed the gate, or both are 0.
//! 4. The writer's sum sees that a reader has left, or the leaving reader sees the closed gate and
//!    wakes the writer under `state`. The reader's `light` and the writer's `heavy` order the store
//!    of each against the load of the other.
//! 5. While `admitted` is not 0 there is no writer: the readers that waited for the previous writer
//!    enter first.
//!
//! # Exclusion
//!
//! | | reader | writer |
//! |---|---|---|
//! | reader | never | once the gate is closed; the writer waits for the readers inside |
//! | writer | always | always |

mod error;
mod guard;
mod inner;

use std::fmt;

pub use self::error::GateError;
pub use self::guard::{ReadGuard, WriteGuard};
use self::inner::Inner;
use crate::error::NewError;
use crate::words::Words;

/// A read-write lock for data that is read all the time and written almost never.
///
/// A reader writes only the word of its own CPU, by two rseq sections where sections run and by two
/// atomic operations elsewhere. A write costs a heavy fence (microseconds) and a walk over the words
/// of all CPUs, and readers wait meanwhile.
///
/// A waiting writer keeps new readers out, so readers do not starve it. The readers that waited for
/// a writer enter before the next writer, so writers do not starve them. Writers have no order
/// among themselves. There is no poisoning: a panic unlocks.
///
/// A call that would wait for a writer on the calling thread returns [`GateError::Deadlock`]. Some
/// deadlocks are not detected and wait for ever: [`write`](Self::write) on a thread that holds a
/// [`ReadGuard`], a second [`read`](Self::read) on such a thread while a writer waits, and `write`
/// after a [`ReadGuard`] was forgotten. A thread may exit or change CPUs, with or without its guard.
///
/// Memory: 256 bytes, 8 bytes for every CPU, and the value, rounded up to 128 bytes.
///
/// ```
/// use offlock_percpu::ReadWriteGate;
///
/// let routes = ReadWriteGate::new(vec!["default"])?;
/// assert_eq!(routes.read()?.len(), 1);
/// routes.write()?.push("lan");
/// assert_eq!(*routes.read()?, ["default", "lan"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ReadWriteGate<T> {
    inner: Inner<T>,
}

#[cfg(all(target_arch = "x86_64", not(any(offlock_loom, offlock_shuttle))))]
const _: () = assert!(size_of::<ReadWriteGate<[u8; 128]>>() == 256 + 128);

impl<T> ReadWriteGate<T> {
    /// Creates an open gate. May map memory for the words of the CPUs.
    ///
    /// # Errors
    ///
    /// [`NewError`], which returns `value`, if memory is out.
    pub fn new(value: T) -> Result<Self, NewError<T>> {
        let Ok(words) = Words::new() else { return Err(NewError(value)) };
        Ok(Self { inner: Inner::new(value, words) })
    }

    /// Enters to read. Blocks while a writer is inside or waits.
    ///
    /// While there is no writer, this is wait-free where sections run and lock-free elsewhere.
    ///
    /// # Errors
    ///
    /// [`GateError::Deadlock`] if the calling thread is the writer.
    #[inline]
    pub fn read(&self) -> Result<ReadGuard<'_, T>, GateError> {
        if !self.inner.enter() {
            self.inner.enter_slow()?;
        }
        Ok(ReadGuard::new(&self.inner))
    }

    /// Enters to read, unless a writer is inside or waits. Never blocks.
    ///
    /// Wait-free where sections run and lock-free elsewhere.
    ///
    /// # Errors
    ///
    /// [`GateError::Deadlock`] if the calling thread is the writer, and [`GateError::WouldBlock`]
    /// where [`read`](Self::read) waits.
    #[inline]
    pub fn try_read(&self) -> Result<ReadGuard<'_, T>, GateError> {
        if self.inner.enter() {
            Ok(ReadGuard::new(&self.inner))
        } else {
            Err(self.inner.try_error())
        }
    }

    /// Enters to write. Keeps new readers out, and blocks until the readers inside have left.
    ///
    /// # Errors
    ///
    /// [`GateError::Deadlock`] if the calling thread is the writer already.
    pub fn write(&self) -> Result<WriteGuard<'_, T>, GateError> {
        self.inner.write()?;
        Ok(WriteGuard::new(&self.inner))
    }

    /// Enters to write, unless a reader or a writer is inside.
    ///
    /// Does not wait for readers or writers, but costs as much as [`write`](Self::write), and keeps
    /// new readers out for that long.
    ///
    /// # Errors
    ///
    /// [`GateError::Deadlock`] if the calling thread is the writer already, and
    /// [`GateError::WouldBlock`] where [`write`](Self::write) waits.
    pub fn try_write(&self) -> Result<WriteGuard<'_, T>, GateError> {
        self.inner.try_write()?;
        Ok(WriteGuard::new(&self.inner))
    }

    /// Returns the value without entering: `&mut self` proves that no guard exists.
    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: a guard borrows the gate, so `&mut self` excludes every guard.
        self.inner.value.with_mut(|value| unsafe { &mut *value })
    }

    /// Takes the value out.
    pub fn into_inner(self) -> T {
        self.inner.value.into_inner()
    }
}

impl<T: fmt::Debug> fmt::Debug for ReadWriteGate<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gate = f.debug_struct("ReadWriteGate");
        match self.try_read() {
            Ok(value) => gate.field("value", &*value),
            Err(_) => gate.field("value", &format_args!("<closed>")),
        };
        gate.finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
