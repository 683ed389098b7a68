//! The table, and lookups in it.

use std::fmt;
use std::marker::PhantomData;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;

use percpu::rcu::{self, Pinned};

use super::core::Core;
use super::error::LookupError;
use super::id::Id;

/// A table of contexts by [`Id`]s that the table assigns: dense, checked by generation, read without a
/// lock.
///
/// Lookups are wait-free and write nothing that other threads read. A removed context stays valid for the
/// readers that found it, and is dropped when the last of them has left.
///
/// ```
/// use radix_ctx::{CtxTable, LookupError, rcu};
///
/// let sessions = CtxTable::new();
/// let id = sessions.insert(String::from("alice"))?;
///
/// let guard = rcu::pin();
/// let alice = sessions.get(id, &guard)?;
/// sessions.remove(id)?;
/// assert_eq!(alice, "alice"); // valid until the guard ends
/// assert_eq!(sessions.get(id, &guard), Err(LookupError::Stale));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CtxTable<T: Send + Sync + 'static> {
    core: NonNull<Core<T>>,
    _owns: PhantomData<Box<T>>,
}

// SAFETY: the table owns its core and the contexts as a box would, and `Core` is `Send`.
unsafe impl<T: Send + Sync + 'static> Send for CtxTable<T> {}
// SAFETY: a `&CtxTable` gives access to a `&Core`, which is `Sync`.
unsafe impl<T: Send + Sync + 'static> Sync for CtxTable<T> {}

// No code of the user runs under the lock, so a panic leaves the table consistent.
impl<T: Send + Sync + 'static> UnwindSafe for CtxTable<T> {}
impl<T: Send + Sync + 'static> RefUnwindSafe for CtxTable<T> {}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Makes the table of a core that has none.
    pub(super) fn from_core(core: NonNull<Core<T>>) -> Self {
        Self { core, _owns: PhantomData }
    }

    #[inline(always)]
    pub(super) fn core(&self) -> &Core<T> {
        // SAFETY: the table keeps its core until the drop of the table.
        unsafe { self.core.as_ref() }
    }

    /// Returns the context of `id`.
    ///
    /// Wait-free, and writes nothing: one load for each six bits of the largest index. The reference
    /// stays valid under the guard if the context is removed. A task that uses it across an `.await` takes
    /// a counted reference ([`get_ref`](Self::get_ref)).
    ///
    /// # Errors
    ///
    /// [`LookupError::Stale`] if the context was removed, [`LookupError::NotFound`] if the table never
    /// had a context of this id.
    #[inline(always)]
    pub fn get<'g>(&'g self, id: Id, guard: &'g impl Pinned) -> Result<&'g T, LookupError> {
        let _ = guard;
        // SAFETY: `guard` is an RCU guard.
        let (_, slot) = unsafe { self.core().slabs.find(id) }?;
        // SAFETY: the context was live under the guard, which is borrowed for `'g`.
        Ok(unsafe { slot.value() })
    }

    /// Calls `f` with the context of `id`, under an RCU guard of this call. Wait-free, except for `f`.
    ///
    /// # Errors
    ///
    /// The errors of [`get`](Self::get); `f` is not called then.
    #[inline]
    pub fn with<R>(&self, id: Id, f: impl FnOnce(&T) -> R) -> Result<R, LookupError> {
        let guard = rcu::pin();
        self.get(id, &guard).map(f)
    }

    /// Returns whether `id` names a live context. Wait-free.
    #[inline]
    #[must_use]
    pub fn contains(&self, id: Id) -> bool {
        let _guard = rcu::pin();
        // SAFETY: `_guard` is an RCU guard.
        unsafe { self.core().slabs.find(id) }.is_ok()
    }
}

impl<T: Send + Sync + 'static> Drop for CtxTable<T> {
    /// Removes every context, and drops those without a [`CtxRef`](super::CtxRef): in this call, or on
    /// another thread that reclaims at this moment. The last reference drops each of the others. The
    /// memory of the table is freed a grace period after the last context. Waits for no readers: they
    /// would borrow the table.
    fn drop(&mut self) {
        // SAFETY: `&mut self` of a drop excludes every borrow of the table, and a drop runs once.
        unsafe { Core::end_table(self.core) };
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for CtxTable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CtxTable").field("len", &self.len()).finish_non_exhaustive()
    }
}
