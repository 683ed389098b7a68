//! The owner of a value on a list, and references that keep a value alive.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;

use offlock_percpu::CpuId;

use crate::cells::{Cells, Key};
use crate::error::Deadlock;

/// A value on a list. Dropping the entry removes the value, and drops it unless a [`Ref`] exists.
///
/// The entry does not borrow the list: it can be stored anywhere, and may outlive the list.
///
/// ```
/// use percpu_list::{Entry, PerCpuList};
///
/// struct Connection {
///     registered: Entry<u32>, // removed from the list with the connection
/// }
///
/// let connections = PerCpuList::new();
/// let connection = Connection { registered: connections.insert(7)? };
/// assert_eq!((*connection.registered, connections.len()), (7, 1));
/// drop(connection);
/// assert!(connections.is_empty());
/// # Ok::<(), percpu_list::InsertError<u32>>(())
/// ```
///
/// If this thread has a [`Snapshot`](crate::Snapshot) of the list, a dropped entry is removed at its
/// end. The drop waits for a snapshot of another thread. A forgotten entry stays on the list until a
/// drain; its value is not dropped, and its list keeps its memory.
///
/// ```
/// use percpu_list::PerCpuList;
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert("alice")?;
/// let shared = alice.share(); // keeps the value, but not on the list
/// assert!(alice.remove().unwrap()); // the same as `drop`, with a result
/// assert_eq!((*shared, shared.is_linked()), ("alice", false));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping an entry removes it at once"]
pub struct Entry<T> {
    key: Key,
    list: NonNull<Cells<T>>,
    /// Tells the compiler that the entry drops a `T`.
    _value: PhantomData<T>,
}

// SAFETY: the new thread may drop the value, for which it is `Send`, and shares it with walks, for
// which it is `Sync`.
unsafe impl<T: Send + Sync> Send for Entry<T> {}
// SAFETY: a shared entry gives out `&T` and, by `share`, references that may drop the value on any
// thread. `T` is `Send` and `Sync`.
unsafe impl<T: Send + Sync> Sync for Entry<T> {}

impl<T> Entry<T> {
    /// # Safety
    ///
    /// The key is that of an entry of the list, which passes to the result.
    #[inline(always)]
    pub(crate) unsafe fn new(key: Key, list: NonNull<Cells<T>>) -> Self {
        Self { key, list, _value: PhantomData }
    }

    /// Returns the CPU whose slot the value was added to.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        // SAFETY: this is the entry.
        unsafe { self.key.slot() }
    }

    /// Returns whether the value is on the list. It is false after a drain or
    /// [`PerCpuList::remove`](crate::PerCpuList::remove) has removed the value.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        // SAFETY: this is the entry.
        unsafe { self.key.is_linked() }
    }

    /// Returns a reference that keeps the value alive, but not on the list. Wait-free.
    ///
    /// A later removal of the entry uses atomic operations instead of a section, and takes about
    /// three times as long.
    #[must_use]
    pub fn share(&self) -> Ref<T> {
        // SAFETY: this is the entry.
        unsafe { self.key.mark_and_pin() };
        // SAFETY: the pin passes to the reference.
        unsafe { Ref::from_pin(self.key) }
    }

    /// Removes the value, and returns whether it was still on the list. Drops the value, unless a
    /// [`Ref`] exists.
    ///
    /// Does the same as dropping the entry, but returns the result.
    ///
    /// # Errors
    ///
    /// [`Deadlock`] if this thread has a snapshot, at whose end the value is removed.
    #[inline]
    pub fn remove(self) -> Result<bool, Deadlock> {
        let entry = ManuallyDrop::new(self); // it ends also if the drop of the value panics
        // SAFETY: this is the entry, which ends.
        unsafe { entry.end() }
    }

    /// # Safety
    ///
    /// The entry ends.
    #[inline(always)]
    unsafe fn end(&self) -> Result<bool, Deadlock> {
        // SAFETY: by the contract of this function.
        let removed = unsafe { Cells::remove(self.list, self.key) };
        if removed.is_err() {
            // SAFETY: by the contract of this function: the entry passes to this thread's snapshot.
            unsafe { Cells::defer(self.list, self.key) };
        }
        removed
    }
}

impl<T> Deref for Entry<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this is the entry, so the cell has its value.
        unsafe { Cells::value(self.key) }
    }
}

impl<T> Drop for Entry<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this is the entry, which ends.
        let _ = unsafe { self.end() };
    }
}

impl<T: fmt::Debug> fmt::Debug for Entry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("slot", &self.slot())
            .field("value", &**self)
            .finish_non_exhaustive()
    }
}

/// A reference that keeps a value of a list alive, even after its entry was removed or the list was
/// dropped.
///
/// The value is dropped with the last of its references and its entry. Clone and drop are
/// wait-free. Each is one atomic operation on a word that the references to one value share, and
/// whose cache line it shares with 15 other values.
///
/// ```
/// use percpu_list::{PerCpuList, Ref};
///
/// let sessions = PerCpuList::new();
/// let alice = sessions.insert(String::from("alice"))?;
/// let found: Ref<String> = sessions.iter().next().unwrap();
/// drop(alice);
/// assert!(sessions.is_empty() && !found.is_linked());
/// assert_eq!(*found, "alice"); // dropped with the last reference
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Ref<T> {
    key: Key,
    /// Tells the compiler that the last reference drops a `T`.
    _value: PhantomData<T>,
}

// SAFETY: references on several threads share `&T`, for which `T` is `Sync`. The last one drops the
// value on its thread, for which `T` is `Send`.
unsafe impl<T: Send + Sync> Send for Ref<T> {}
// SAFETY: a shared reference gives out `&T`, and clones, which are `Send` because `T` is `Send` and
// `Sync`.
unsafe impl<T: Send + Sync> Sync for Ref<T> {}

impl<T> Ref<T> {
    /// # Safety
    ///
    /// The caller has a pin of the cell, which is of a list of `T`. It passes to the reference.
    pub(crate) unsafe fn from_pin(key: Key) -> Self {
        Self { key, _value: PhantomData }
    }

    pub(crate) fn key(&self) -> Key {
        self.key
    }

    /// Returns whether the entry is on its list. Another thread may change that at any time.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        // SAFETY: the reference is a pin.
        unsafe { self.key.is_linked() }
    }

    /// Returns the CPU whose slot the entry was added to.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        // SAFETY: the reference is a pin.
        unsafe { self.key.slot() }
    }

    /// Returns whether both are references to the same entry.
    #[must_use]
    pub fn ptr_eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl<T> Deref for Ref<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the value is pinned.
        unsafe { Cells::value(self.key) }
    }
}

impl<T> Clone for Ref<T> {
    fn clone(&self) -> Self {
        // SAFETY: the reference is a pin.
        unsafe { self.key.pin_again() };
        Self { key: self.key, _value: PhantomData }
    }
}

impl<T> Drop for Ref<T> {
    fn drop(&mut self) {
        // SAFETY: the reference is a pin of a cell of `T`, which ends.
        unsafe { Cells::<T>::unpin(self.key) };
    }
}

impl<T: fmt::Debug> fmt::Debug for Ref<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ref").field(&**self).finish()
    }
}
