//! The table: its limits, inserts and lookups.
//!
//! ```text
//!   CtxTable -> Core: tree -> node -> node -> Slab | state, T | state, T | ... 64
//!                                                      ^
//!   id = generation, index  -----------------------> state == id? then it is live
//! ```

use std::fmt;
use std::marker::PhantomData;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;

use offlock_percpu::rcu::{self, Guard, RetireHead};
use offlock_sync::quarantine::Watched;

use crate::core::{Core, Quota};
use crate::error::{InsertError, InsertRefused, LookupError};
use crate::id::Id;
use crate::reclaim::{SMALLEST, run_callback};
use crate::slab::MAX_INDEX;
use crate::vacancy::Claim;

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
    pub fn get<'g>(&'g self, id: Id, guard: &'g Guard) -> Result<&'g T, LookupError> {
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
    /// Removes every context, and drops those without a [`CtxRef`](crate::CtxRef): in this call, or on
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

/// Makes a [`CtxTable`] with limits. Returned by [`CtxTable::builder`].
///
/// ```
/// use radix_ctx::{CtxTable, InsertRefused};
///
/// let table = CtxTable::builder().max_contexts(1).build();
/// let first = table.insert("one").expect("it is empty");
/// let refused = table.insert("two").unwrap_err();
/// assert_eq!((refused.reason, refused.value), (InsertRefused::Quota { limit: 1 }, "two"));
/// table.remove(first).expect("it is there");
/// table.insert("two").expect("removed contexts do not count");
/// ```
#[derive(Debug)]
#[must_use = "`build` makes the table"]
pub struct Builder<T> {
    contexts: Option<u64>,
    max_index: u32,
    _makes: PhantomData<fn() -> T>,
}

impl<T: Send + Sync + 'static> Builder<T> {
    /// Limits the number of live contexts. The default is the number of indexes.
    ///
    /// A removed context does not count, although readers may still use it. While a reader stays, each
    /// removal and insert takes more memory; only [`max_index`](Self::max_index) limits that.
    ///
    /// A removal happens before the insert that takes its place.
    pub fn max_contexts(mut self, contexts: u64) -> Self {
        self.contexts = Some(contexts);
        self
    }

    /// Sets the largest index of an id. The default is 2^32 - 3, which is also the largest value.
    ///
    /// With a small one, inserts may be refused although few contexts are live, until readers let the
    /// table use the indexes of removed contexts again.
    pub fn max_index(mut self, index: u32) -> Self {
        self.max_index = index.min(MAX_INDEX);
        self
    }

    /// Makes a table with these limits.
    #[must_use]
    pub fn build(self) -> CtxTable<T> {
        if cfg!(not(offlock_model)) {
            // The first use of percpu reads /sys, allocates and may start a thread. Later it would do so
            // under the table's lock, for the first counted reference.
            let _ = offlock_percpu::capabilities();
        }
        // SAFETY: `run_callback` is for the callbacks of cores, and this head becomes one.
        let callback = unsafe { RetireHead::new(run_callback::<T>) };
        let core = Core::new(self.max_index, Quota::new(self.contexts), callback, SMALLEST);
        CtxTable::from_core(Core::place(Box::new(Watched::new(core))))
    }
}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Makes an empty table without limits.
    #[must_use]
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Returns a builder, for a table with limits.
    pub fn builder() -> Builder<T> {
        Builder { contexts: None, max_index: MAX_INDEX, _makes: PhantomData }
    }
}

impl<T: Send + Sync + 'static> Default for CtxTable<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Inserts a context at the lowest vacant index, and returns its id.
    ///
    /// The index of a removed context becomes vacant when its readers have left, after a grace period,
    /// and its last [`CtxRef`](crate::CtxRef) is dropped. [`flush`](Self::flush) waits for the readers.
    ///
    /// Blocks shortly on the table's lock. Allocates a slab if the lowest vacant index has none, although
    /// a slab of higher indexes may have room; if many slots are those of removed contexts, reclaims them
    /// first, which runs their drops.
    ///
    /// # Errors
    ///
    /// [`InsertError`] returns the value and the reason; the call changed nothing.
    #[inline]
    pub fn insert(&self, value: T) -> Result<Id, InsertError<T>> {
        match self.core().admit() {
            Ok(claim) => Ok(claim.publish(value)),
            Err(reason) => Err(InsertError { value, reason }),
        }
    }
}

/// The share of an insert in the limit, which the drop gives back. An insert that has a slot forgets it.
struct Share<'a>(&'a Quota);

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.0.give_back(1);
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Counts a context for the limit and claims a vacant slot.
    #[inline]
    pub(super) fn admit(&self) -> Result<Claim<'_, T>, InsertRefused> {
        self.quota.take().map_err(|limit| InsertRefused::Quota { limit })?;
        let share = Share(&self.quota); // the claim may run drops of contexts, which may panic
        let claim = self.claim()?;
        std::mem::forget(share);
        Ok(claim)
    }
}
