//! The right to a value's place on a list.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;

use percpu::CpuId;
#[cfg(doc)]
use percpu::lglock::LockError;

use crate::error::RemoveError;

use super::deferred::defer;
use super::node::{NodePtr, Ref};
use super::nodes::Nodes;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// What an [`Entry`] holds its list by: a borrow, or an `Arc`.
pub trait Holder: sealed::Sealed {
    /// What the list's values are.
    type Value;

    #[doc(hidden)]
    fn nodes(&self) -> &Nodes<Self::Value>;
}

/// A value on a list; dropping it removes it, and then drops the value unless a [`Ref`] has it.
///
/// It is `Entry<&PerCpuList<T>>`, or `Entry<Arc<PerCpuList<T>>>`, which may be stored anywhere; making
/// and dropping that counts in the `Arc`, on a cache line that all CPUs share.
///
/// Drop blocks while another thread holds the slot's lock, for as long as it takes. Where it would
/// wait for its own thread (inside [`for_each`](crate::PerCpuList::for_each) or a
/// [`Snapshot`](super::Snapshot)), the removal is [deferred](Self::defer_remove). A forgotten entry stays on the list until that is dropped.
#[must_use = "dropping an entry removes it at once"]
pub struct Entry<L: Holder> {
    node: NodePtr<L::Value>,
    list: L,
}

// SAFETY: shares the value with walks, and may drop it here; the list is reached through `L`.
unsafe impl<L: Holder + Send> Send for Entry<L> where L::Value: Send + Sync {}
// SAFETY: `&Entry` gives `&T`, and `share`.
unsafe impl<L: Holder + Sync> Sync for Entry<L> where L::Value: Send + Sync {}

impl<L: Holder> Entry<L> {
    /// # Safety
    ///
    /// The entry's count of the node passes to it; the node was inserted into the list.
    #[inline(always)]
    pub(super) unsafe fn new(node: NodePtr<L::Value>, list: L) -> Self {
        Self { node, list }
    }

    /// Where the value was added: the CPU, if the list has a slot for each.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        // SAFETY: the entry's count.
        unsafe { self.node.anchor() }.home()
    }

    /// False once a drain, or [`PerCpuList::remove`](crate::PerCpuList::remove), took it off the list.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        // SAFETY: the entry's count.
        unsafe { self.node.anchor() }.is_linked()
    }

    /// Another reference to the value, which does not keep it on the list. Wait-free.
    #[must_use]
    pub fn share(&self) -> Ref<L::Value> {
        // SAFETY: the entry's count.
        unsafe { self.node.acquire() }
    }

    /// Removes the value and drops it, unless a [`Ref`] has it. False if it was taken off the list
    /// before.
    ///
    /// What dropping the entry does, but says how that went. Blocks like it.
    ///
    /// # Errors
    ///
    /// The entry, still on the list, if its slot cannot be locked: [`LockError::Deadlock`] if this
    /// thread holds it.
    pub fn remove(self) -> Result<bool, RemoveError<Self>> {
        let from = self.list.nodes().core().domain().current_slot();
        self.remove_from(from, true)
    }

    /// Removes the value as if the caller ran on `cpu`: that is what the hits are counted by.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove), and [`LockError::NoSuchCpu`].
    pub fn remove_on(self, cpu: CpuId) -> Result<bool, RemoveError<Self>> {
        match self.list.nodes().core().domain().slot_of(cpu) {
            Ok(from) => self.remove_from(from, true),
            Err(reason) => Err(RemoveError { entry: self, reason }),
        }
    }

    /// Removes the value if its slot's lock is free. Never blocks; but not for signal handlers, since
    /// it drops the value: see [`defer_remove`](Self::defer_remove).
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove), and [`LockError::WouldBlock`].
    pub fn try_remove(self) -> Result<bool, RemoveError<Self>> {
        let from = self.list.nodes().core().domain().current_slot();
        self.remove_from(from, false)
    }

    fn remove_from(self, from: CpuId, may_wait: bool) -> Result<bool, RemoveError<Self>> {
        // SAFETY: the entry's count and node.
        match unsafe { self.list.nodes().remove_entry(self.node, from, may_wait) } {
            Ok(entry) => {
                let (_node, list) = self.into_parts(); // its count has passed on
                let removed = entry.removed;
                drop(entry);
                drop(list); // also if the line before panics
                Ok(removed)
            }
            Err(reason) => Err(RemoveError { entry: self, reason }),
        }
    }

    /// Removes the value, and keeps it.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove).
    pub fn into_ref(self) -> Result<Ref<L::Value>, RemoveError<Self>> {
        let nodes = self.list.nodes();
        // SAFETY: an entry's node.
        match unsafe { nodes.unlink(self.node, nodes.core().domain().current_slot()) } {
            Ok(_) => {
                let (node, _list) = self.into_parts();
                // SAFETY: the entry's count, and the node is unlinked.
                Ok(unsafe { Ref::from_count(node) })
            }
            Err(reason) => Err(RemoveError { entry: self, reason }),
        }
    }

    /// Leaves the removal to whoever locks the list's part of the slot next: to add or remove there,
    /// to walk, to take a snapshot, or to [`flush`](crate::PerCpuList::flush).
    ///
    /// For signal handlers: lock-free, and async-signal-safe. It takes no lock, allocates nothing and
    /// drops nothing: the value is dropped by that other thread, after its unlock. Walks and
    /// snapshots that begin later do not see it; [`len`](crate::PerCpuList::len) may count it until then.
    ///
    /// An `Arc` by which the entry holds its list is dropped here. In a handler it must not be the
    /// last, which drops the list: see [`defer_remove_keeping`](Self::defer_remove_keeping).
    pub fn defer_remove(self) {
        drop(self.defer_remove_keeping());
    }

    /// The same, but gives back what the entry held its list by: for a handler that cannot know
    /// whether its `Arc` is the last, and hands it on.
    #[must_use = "for whoever may drop it; else `defer_remove` does the same"]
    pub fn defer_remove_keeping(self) -> L {
        let (node, list) = self.into_parts();
        // SAFETY: the entry's count and node.
        unsafe { defer(list.nodes().core(), node) };
        list
    }

    /// The node, and with it the count.
    #[inline(always)]
    pub(super) fn into_node(self) -> NodePtr<L::Value> {
        self.into_parts().0
    }

    #[inline(always)]
    fn into_parts(self) -> (NodePtr<L::Value>, L) {
        let entry = ManuallyDrop::new(self);
        // SAFETY: read once; the entry is not dropped.
        (entry.node, unsafe { std::ptr::read(&entry.list) })
    }
}

impl<L: Holder> Deref for Entry<L> {
    type Target = L::Value;

    #[inline]
    fn deref(&self) -> &L::Value {
        // SAFETY: the entry's count.
        unsafe { self.node.value() }
    }
}

impl<L: Holder> Drop for Entry<L> {
    #[inline]
    fn drop(&mut self) {
        let nodes = self.list.nodes();
        let from = nodes.core().domain().current_slot();
        // SAFETY: the entry's node and count, which it uses here only.
        let removed = unsafe { nodes.remove_entry(self.node, from, true) };
        if removed.is_err() {
            // SAFETY: as above; the count did not pass on.
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
