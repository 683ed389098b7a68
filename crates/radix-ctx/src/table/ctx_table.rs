//! The table, and lookups in it.

use std::fmt;
use std::marker::PhantomData;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;

use percpu::rcu::{self, Pinned};

use super::core::Core;
use super::error::LookupError;
use super::id::Id;

/// Contexts by ids that the table hands out: dense, checked by generation, read without a lock.
pub struct CtxTable<T: Send + Sync + 'static> {
    core: NonNull<Core<T>>,
    _owns: PhantomData<Box<T>>,
}

// SAFETY: the core is `Send` and `Sync`; a table owns what is in it as a box would.
unsafe impl<T: Send + Sync + 'static> Send for CtxTable<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync + 'static> Sync for CtxTable<T> {}

// A panic leaves nothing half done: every step under the lock is finished or not begun.
impl<T: Send + Sync + 'static> UnwindSafe for CtxTable<T> {}
impl<T: Send + Sync + 'static> RefUnwindSafe for CtxTable<T> {}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Makes the table of a core that has none.
    pub(super) fn from_core(core: NonNull<Core<T>>) -> Self {
        Self { core, _owns: PhantomData }
    }

    #[inline(always)]
    pub(super) fn core(&self) -> &Core<T> {
        // SAFETY: it lives as long as the table.
        unsafe { self.core.as_ref() }
    }

    /// The context of `id`, for as long as the guard and the table are borrowed.
    ///
    /// Wait-free, and writes nothing: a few loads, one for each six bits of the largest index. The
    /// context may be removed meanwhile; the reference stays good.
    ///
    /// # Errors
    ///
    /// [`LookupError::Stale`] if it was removed, [`LookupError::NotFound`] if it never was there.
    #[inline(always)]
    pub fn get<'g>(&'g self, id: Id, guard: &'g impl Pinned) -> Result<&'g T, LookupError> {
        let _ = guard;
        // SAFETY: the guard.
        let (_, slot) = unsafe { self.core().slabs.find(id) }?;
        // SAFETY: live a moment ago, under the guard.
        Ok(unsafe { slot.value() })
    }

    /// Calls `f` with the context of `id`, under a guard of its own. Wait-free, but for `f`.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get); `f` is not called then.
    #[inline]
    pub fn with<R>(&self, id: Id, f: impl FnOnce(&T) -> R) -> Result<R, LookupError> {
        let guard = rcu::pin();
        self.get(id, &guard).map(f)
    }

    /// Whether `id` names a context just now. Wait-free.
    #[inline]
    #[must_use]
    pub fn contains(&self, id: Id) -> bool {
        let _guard = rcu::pin();
        // SAFETY: the guard.
        unsafe { self.core().slabs.find(id) }.is_ok()
    }
}

impl<T: Send + Sync + 'static> Drop for CtxTable<T> {
    /// Removes every context and drops those that nobody has a [`CtxRef`] of, here or, if another
    /// thread is just reclaiming, there; the last reference drops each of the others, and with the last
    /// of them goes the memory of the table, a grace period later. Does not wait for readers: there are
    /// none, as they borrow the table.
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
