//! The entry of an owning list, which removes its value when it is dropped.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;

use offlock_percpu::CpuId;
#[cfg(doc)]
use offlock_percpu::lglock::LockError;

use crate::error::RemoveError;

use super::deferred::defer;
use super::node::{NodePtr, Ref};
use super::nodes::Nodes;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// How an [`Entry`] refers to its list: by a borrow or by an `Arc`.
///
/// Two types implement it, `&PerCpuList<T>` and `Arc<PerCpuList<T>>`. A function can accept entries
/// of both:
///
/// ```
/// use std::sync::Arc;
///
/// use percpu_list::{Entry, Holder, PerCpuList};
///
/// fn length<L: Holder<Value = String>>(session: &Entry<L>) -> usize {
///     session.len()
/// }
///
/// let sessions = Arc::new(PerCpuList::new());
/// let [alice, bob] = ["alice", "bob"].map(String::from);
/// assert_eq!(length(&sessions.insert(alice)?), 5);
/// assert_eq!(length(&sessions.insert_arc(bob)?), 3);
/// # Ok::<(), percpu_list::InsertError<String>>(())
/// ```
pub trait Holder: sealed::Sealed {
    /// The type of the list's values.
    type Value;

    #[doc(hidden)]
    fn nodes(&self) -> &Nodes<Self::Value>;
}

/// A value on a list. Dropping the entry removes the value, and drops it unless a [`Ref`] exists.
///
/// The type is `Entry<&PerCpuList<T>>`, or [`ArcEntry<T>`](crate::ArcEntry), which can be stored
/// anywhere. Creating and dropping the latter changes the count of the `Arc`, on a cache line that
/// all CPUs share.
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
///
/// The drop blocks while another thread holds the slot. If this thread has a
/// [`Snapshot`](super::Snapshot) of the list, the entry is removed at its end. A forgotten entry
/// stays on the list until the list is dropped or drained.
#[must_use = "dropping an entry removes it at once"]
pub struct Entry<L: Holder> {
    node: NodePtr<L::Value>,
    list: L,
}

// SAFETY: the new thread may drop the value, for which it is `Send`, and shares it with walks, for
// which it is `Sync`. It uses the list through `L`, which is `Send`.
unsafe impl<L: Holder + Send> Send for Entry<L> where L::Value: Send + Sync {}
// SAFETY: a shared entry gives out `&T` and, by `share`, references that may drop the value on any
// thread. `T` is `Send` and `Sync`.
unsafe impl<L: Holder + Sync> Sync for Entry<L> where L::Value: Send + Sync {}

impl<L: Holder> Entry<L> {
    /// # Safety
    ///
    /// The node was inserted into the list. The caller has the entry's count of the node, which
    /// passes to the entry.
    #[inline(always)]
    pub(super) unsafe fn new(node: NodePtr<L::Value>, list: L) -> Self {
        Self { node, list }
    }

    /// Returns the CPU whose slot the value was added to.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        // SAFETY: the entry's count keeps the node alive.
        unsafe { self.node.anchor() }.home()
    }

    /// Returns whether the value is on the list. It is false after a drain or
    /// [`PerCpuList::remove`](crate::PerCpuList::remove) has removed the value.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        // SAFETY: the entry's count keeps the node alive.
        unsafe { self.node.anchor() }.is_linked()
    }

    /// Returns a reference that keeps the value alive, but not on the list. Wait-free.
    #[must_use]
    pub fn share(&self) -> Ref<L::Value> {
        // SAFETY: the entry's count keeps the node alive.
        unsafe { self.node.acquire() }
    }

    /// Removes the value, and returns whether it was still on the list. Drops the value, unless a
    /// [`Ref`] exists.
    ///
    /// Does the same as dropping the entry, but returns the result. Blocks while another thread
    /// holds the slot.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread has a snapshot. The error contains the entry, whose
    /// value stays on the list.
    pub fn remove(self) -> Result<bool, RemoveError<Self>> {
        let nodes = self.list.nodes();
        // SAFETY: the node was inserted into this list, and the entry has its count. On success the
        // entry does not use it again.
        match unsafe { nodes.remove_entry(self.node, nodes.core().slots().current()) } {
            Ok(entry) => {
                let (_node, list) = self.into_parts(); // `remove_entry` has used its count
                let removed = entry.removed;
                drop(entry);
                drop(list); // after the entry, also if the drop of the entry panics
                Ok(removed)
            }
            Err(reason) => Err(RemoveError { entry: self, reason }),
        }
    }

    /// Removes the value from the list, and returns a reference that keeps it alive.
    ///
    /// # Errors
    ///
    /// The errors of [`remove`](Self::remove).
    pub fn into_ref(self) -> Result<Ref<L::Value>, RemoveError<Self>> {
        let nodes = self.list.nodes();
        // SAFETY: the node was inserted into this list, and the entry's count keeps it alive.
        match unsafe { nodes.unlink(self.node, nodes.core().slots().current()) } {
            Ok(_) => {
                let (node, _list) = self.into_parts();
                // SAFETY: the entry's count passes to the reference, and the node is unlinked for
                // good.
                Ok(unsafe { Ref::from_count(node) })
            }
            Err(reason) => Err(RemoveError { entry: self, reason }),
        }
    }

    #[inline(always)]
    fn into_parts(self) -> (NodePtr<L::Value>, L) {
        let entry = ManuallyDrop::new(self);
        // SAFETY: `list` is moved out once, because the entry is not dropped.
        (entry.node, unsafe { std::ptr::read(&entry.list) })
    }
}

impl<L: Holder> Deref for Entry<L> {
    type Target = L::Value;

    #[inline]
    fn deref(&self) -> &L::Value {
        // SAFETY: the entry's count keeps the node alive.
        unsafe { self.node.value() }
    }
}

impl<L: Holder> Drop for Entry<L> {
    #[inline]
    fn drop(&mut self) {
        let nodes = self.list.nodes();
        let from = nodes.core().slots().current();
        // SAFETY: the node was inserted into this list, and the entry's count passes on unless the
        // result is an error.
        let removed = unsafe { nodes.remove_entry(self.node, from) };
        if removed.is_err() {
            // SAFETY: the node was inserted into this list, and the entry still has its count. The
            // error is that this thread has a snapshot, which holds the lock of the slot.
            unsafe { defer(nodes.core(), self.node) };
        }
    }
}

impl<L: Holder> fmt::Debug for Entry<L>
where
    L::Value: fmt::Debug,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("slot", &self.slot())
            .field("value", &**self)
            .finish_non_exhaustive()
    }
}
