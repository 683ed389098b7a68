//! The public type of the list.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use crate::cells::Cells;
use crate::entry::{Entry, Ref};
use crate::error::{Deadlock, InsertError};
use crate::snapshot::Snapshot;
use crate::stats::Stats;
use crate::walk::{Drain, Iter};

/// A registry of values, with one list per CPU. A thread adds on its CPU, and removes from any.
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert("alice")?;
/// let _bob = sessions.insert("bob")?;
/// assert_eq!((*alice, sessions.len()), ("alice", 2));
///
/// for session in sessions.iter() {
///     println!("{}", *session); // no lock is held here
/// }
/// drop(alice); // removes it
/// assert_eq!(sessions.lock_all()?.iter().copied().collect::<Vec<_>>(), ["bob"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Values are stored in blocks of 64 cells, and do not move until their removal. A value of more
/// than 256 bytes, or aligned to more than 64, has an allocation of its own. Values are dropped with
/// no lock held.
///
/// Entries and [`Ref`]s may outlive the list, and keep its memory until the last of them ends.
///
/// The list is `Send` and `Sync` if `T` is both, because walks share values, and any thread may
/// drop the last reference to one. It is invariant in `T`:
///
/// ```compile_fail
/// fn shorten<'a>(list: percpu_list::PerCpuList<&'static str>) -> percpu_list::PerCpuList<&'a str> {
///     list
/// }
/// ```
pub struct PerCpuList<T> {
    cells: NonNull<Cells<T>>,
    /// Tells the compiler that the list drops values.
    _value: PhantomData<T>,
}

// SAFETY: any thread that has the list may drop values, and shares values with references on other
// threads. `T` is `Send` and `Sync`.
unsafe impl<T: Send + Sync> Send for PerCpuList<T> {}
// SAFETY: a shared list gives out references to values, the last of which drops the value on any
// thread. `T` is `Send` and `Sync`. The cells change by sections, by atomics and under locks.
unsafe impl<T: Send + Sync> Sync for PerCpuList<T> {}

impl<T> PerCpuList<T> {
    /// Creates an empty list with a slot of 128 bytes for each CPU. A slot allocates with its first
    /// entry.
    #[must_use]
    pub fn new() -> Self {
        Self { cells: Cells::create(), _value: PhantomData }
    }

    #[inline(always)]
    pub(crate) fn cells(&self) -> &Cells<T> {
        // SAFETY: the cells live at least as long as the list.
        unsafe { self.cells.as_ref() }
    }

    /// Adds a value in the slot of the current CPU. The entry may outlive the list.
    ///
    /// Allocates a block of cells if the slot has no free one, and memory for a large value. The
    /// [table](crate#waits) says what it waits for.
    ///
    /// # Errors
    ///
    /// [`InsertError`] contains the value and the reason: the list is closed, memory is out, or
    /// this thread has a [`Snapshot`].
    #[inline(always)]
    pub fn insert(&self, value: T) -> Result<Entry<T>, InsertError<T>> {
        let key = self.cells().insert(value)?;
        // SAFETY: the key is that of a new entry.
        Ok(unsafe { Entry::new(key, self.cells) })
    }

    /// Removes the value of `found` from this list, even if its [`Entry`] still exists. Returns
    /// whether it was on this list.
    ///
    /// If several threads remove the value, one call returns true. Waits for a [`Snapshot`] of
    /// another thread.
    ///
    /// # Errors
    ///
    /// [`Deadlock`] if this thread has a snapshot. The value stays on the list.
    pub fn remove(&self, found: &Ref<T>) -> Result<bool, Deadlock> {
        let key = found.key();
        // SAFETY: the reference pins the cell.
        if !ptr::eq(unsafe { key.list::<T>() }, self.cells.as_ptr()) {
            return Ok(false);
        }
        // SAFETY: the reference pins the cell, which is of this list.
        unsafe { self.cells().unlink(key) }
    }

    /// Refuses additions from now on. Those that have begun are complete when it returns, so a
    /// [`drain`](Self::drain) that follows leaves the list empty.
    ///
    /// Removals and walks work as before. Restarts the sections of all threads by one system call, and waits for a [`Snapshot`] of another
    /// thread.
    ///
    /// # Errors
    ///
    /// [`Deadlock`] if this thread has a snapshot. The list is not closed.
    pub fn close(&self) -> Result<(), Deadlock> {
        self.cells().close()
    }

    /// Returns whether [`close`](Self::close) was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.cells().is_closed()
    }

    /// Returns the number of entries, summed block by block while other threads may add and remove.
    /// Wait-free; reads two words for each 64 entries. The number at one instant is that of
    /// [`lock_all`](Self::lock_all).
    #[must_use]
    pub fn len(&self) -> usize {
        self.cells().len()
    }

    /// Returns whether [`len`](Self::len) is 0. Never true while one entry stays on the list.
    /// Wait-free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the counters of the list. Wait-free.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.cells().stats()
    }

    /// Walks the list, with no lock held between entries: see [`Iter`].
    pub fn iter(&self) -> Iter<'_, T> {
        Iter::new(self.cells())
    }

    /// Stops additions and removals. The snapshot shows the list at one instant.
    ///
    /// Until the snapshot is dropped, other threads that add or remove wait, and such calls of this
    /// thread return [`Deadlock`]. Restarts the sections of all threads by one system
    /// call, and waits for a snapshot of another thread.
    ///
    /// # Errors
    ///
    /// [`Deadlock`] if this thread has a snapshot of the list.
    pub fn lock_all(&self) -> Result<Snapshot<'_, T>, Deadlock> {
        Snapshot::new(self.cells())
    }

    /// Removes every entry and returns the values: see [`Drain`].
    pub fn drain(&self) -> Drain<'_, T> {
        Drain::new(self.cells())
    }

    /// Frees the memory of blocks without entries, except the first of each slot. Blocks are never freed
    /// otherwise before the end of the list, because a value does not move.
    ///
    /// Stops additions and removals meanwhile, like [`lock_all`](Self::lock_all). If another thread
    /// is in [`len`](Self::len) or [`stats`](Self::stats) at that moment, the next call frees the
    /// memory.
    ///
    /// # Errors
    ///
    /// [`Deadlock`] if this thread has a snapshot of the list.
    pub fn trim(&self) -> Result<(), Deadlock> {
        self.cells().trim()
    }

    /// Checks the invariants of the list, for tests.
    ///
    /// # Panics
    ///
    /// Panics if an invariant does not hold.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.cells().validate();
    }
}

impl<T> Drop for PerCpuList<T> {
    fn drop(&mut self) {
        // SAFETY: walks and snapshots borrow the list.
        unsafe { Cells::end(self.cells) };
    }
}

impl<T> Default for PerCpuList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a, T> IntoIterator for &'a PerCpuList<T> {
    type Item = Ref<T>;
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Iter<'a, T> {
        self.iter()
    }
}

impl<T> fmt::Debug for PerCpuList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerCpuList")
            .field("len", &self.len())
            .field("closed", &self.is_closed())
            .finish_non_exhaustive()
    }
}
