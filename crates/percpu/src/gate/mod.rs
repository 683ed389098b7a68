//! A read-write lock whose readers count per CPU: nothing shared is written to read.
//!
//! A reader adds one to its CPU's word when it enters and takes one off, on whichever CPU it is
//! by then, when it leaves. A writer closes the gate and waits until the words sum to 0.
//!
//! ```text
//!   reader                                   writer
//!   section: gate = 0? word[cpu] += 1        under `state`: owner = me; gate = me
//!   ...reads...                              heavy_rseq()   nobody enters after this
//!   section: word[cpu] -= 1                  while sum(words) != 0 { wait }
//!   light()                                  ...writes...
//!   gate != 0? wake the writer               under `state`: owner = 0; gate = 0; wake
//! ```
//!
//! That is the shape of the Linux kernel's percpu-rwsem (`kernel/locking/percpu-rwsem.c`, 3.8; the
//! rseq section and its barrier take the place of disabled preemption and of the grace period).
//! Where no sections run, the readers use compare-exchanges, and the lowest bit of a word says
//! that it is closed; a thread without a CPU id does the same with a word of its own, `remote`.
//!
//! # Invariants
//!
//! 1. Nobody enters while the gate is closed: a section commits its entry only while `gate` is 0,
//!    a compare-exchange only from a value without `CLOSED`. `close` returns when no entry begun
//!    before it can still commit.
//! 2. From then on the words only fall, until the writer counts itself in to go on reading
//!    (`downgrade`), so a sum of 0, read word by word in any order, means that
//!    nobody is inside: each word was at least what it is at the end of the walk.
//! 3. `owner` and the gate change under `state` only, and are the same then: the id of the thread
//!    that closed the gate, or 0.
//! 4. A reader that leaves either is seen by the writer's sum, or sees the closed gate and wakes
//!    the writer under `state`: its store and load against the writer's, with `light` and `heavy`
//!    in between.
//! 5. While `admitted` is not 0 there is no writer: the readers that waited for the last one go first.
//!
//! # Who excludes whom
//!
//! | | reader | writer |
//! |---|---|---|
//! | reader | never | from the closing of the gate on; those inside are waited for |
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

/// A read-write lock for what is read all the time and written almost never.
///
/// Reading writes to this CPU's own word only: two rseq sections without an atomic
/// read-modify-write where those run ([`capabilities`](crate::capabilities())), two atomic
/// operations on it elsewhere. Writing is dear: a heavy fence (microseconds) and a walk over the
/// CPUs' words, and readers wait meanwhile.
///
/// A writer that waits keeps new readers out, so it is not starved by them; the readers that
/// waited for a writer go before the next one, so they are not starved either. Writers among
/// themselves have no order. There is no poisoning: a panic unlocks.
///
/// A thread that waits is parked. Waiting for a writer on the same thread is refused, since it could
/// not end. What is not detected:
/// [`write`](Self::write) on a thread that holds a [`ReadGuard`], and a second
/// [`read`](Self::read) on it while a writer waits, both wait for ever, as does `write` after a
/// [`ReadGuard`] was forgotten. A thread may exit, or move to another CPU, with or without its
/// guard: readers are not counted by thread.
///
/// Memory: 256 bytes and 8 bytes for every CPU, and the value, rounded up to 128 bytes.
///
/// ```
/// use percpu::ReadWriteGate;
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
    /// Creates a gate with nobody inside. May map memory for the CPUs' words.
    ///
    /// # Errors
    ///
    /// [`NewError`] if memory is out; it gives `value` back.
    pub fn new(value: T) -> Result<Self, NewError<T>> {
        let Ok(words) = Words::new() else { return Err(NewError(value)) };
        Ok(Self { inner: Inner::new(value, words) })
    }

    /// Enters to read; blocks while a writer is inside or waits.
    ///
    /// Wait-free if there is no writer and sections run; lock-free if there is no writer.
    ///
    /// # Errors
    ///
    /// [`GateError::Deadlock`] if this thread is the writer.
    #[inline]
    pub fn read(&self) -> Result<ReadGuard<'_, T>, GateError> {
        if !self.inner.enter() {
            self.inner.enter_slow()?;
        }
        Ok(ReadGuard::new(&self.inner))
    }

    /// Enters to read, unless a writer is inside or waits. Never blocks; progress as
    /// [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), and [`GateError::WouldBlock`] where that waits.
    #[inline]
    pub fn try_read(&self) -> Result<ReadGuard<'_, T>, GateError> {
        if self.inner.enter() {
            Ok(ReadGuard::new(&self.inner))
        } else {
            Err(self.inner.try_error())
        }
    }

    /// Enters to write: keeps new readers out, and blocks until those inside have left.
    ///
    /// Costs a heavy fence and a walk over the CPUs' words.
    ///
    /// # Errors
    ///
    /// [`GateError::Deadlock`] if this thread is the writer already.
    pub fn write(&self) -> Result<WriteGuard<'_, T>, GateError> {
        self.inner.write()?;
        Ok(WriteGuard::new(&self.inner))
    }

    /// Enters to write if nobody is inside. Does not wait for readers or writers, but costs as much
    /// as [`write`](Self::write), and keeps new readers out for that long.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write), and [`GateError::WouldBlock`] where that waits.
    pub fn try_write(&self) -> Result<WriteGuard<'_, T>, GateError> {
        self.inner.try_write()?;
        Ok(WriteGuard::new(&self.inner))
    }

    /// Reaches the value without entering: `&mut self` proves that nobody is inside.
    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: as above; a guard borrows the gate.
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

/// What may cross threads, and what may be shortened.
const _: () = {
    const fn send<T: Send>() {}
    const fn sync<T: Sync>() {}
    send::<ReadWriteGate<std::cell::Cell<u32>>>();
    sync::<ReadWriteGate<u32>>();
    send::<ReadGuard<'_, u32>>();
    sync::<ReadGuard<'_, u32>>();
    sync::<WriteGuard<'_, u32>>();

    #[expect(dead_code, reason = "compiled for the variance it needs")]
    fn covariant<'short>(guard: ReadGuard<'static, u32>) -> ReadGuard<'short, u32> {
        guard
    }
};

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
