//! Counted references to contexts, which outlive a guard.
//!
//! The first reference to a slab allocates a [`RefBlock`] with a count for each of its 64 slots: one word
//! on each CPU. An rseq section changes the word and tests the slot's state atomically. So get and put of
//! a reference to a live context write no memory that another CPU writes. The count is folded when the
//! removed context is reclaimed ([`reclaim`](crate::reclaim)); after that the last put drops the context.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::ptr::NonNull;

use offlock_percpu::{AllocError, RefBlock, rcu};
use offlock_sync::atomic::Ordering;
use offlock_sync::order;

use crate::core::Core;
use crate::error::{GetRefError, InsertError, InsertRefused};
use crate::id::Id;
use crate::slab::{Refs, SLOTS, Slab, SlabPtr, Slot};
use crate::table::CtxTable;

/// A counted reference to a context, which keeps the context until the reference is dropped.
///
/// It borrows neither a guard nor the table, so it can move to other threads and live across `.await`. If
/// the context is removed ([`is_removed`](Self::is_removed)), or the table dropped, the context is
/// dropped with its last reference. If reclaim has not processed the removal by then, a later reclaim drops
/// it: [`flush`](CtxTable::flush) and the [`Removal`](crate::Removal) wait for that.
///
/// While the context is live, clone and drop are wait-free and write to memory of this CPU only.
///
/// ```
/// use radix_ctx::{CtxRef, CtxTable};
///
/// let table = CtxTable::new();
/// let id = table.insert(String::from("alice"))?;
/// let alice = table.get_ref(id)?;
/// let worker = std::thread::spawn(move || alice.len());
/// assert_eq!(worker.join().unwrap(), 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
///
/// The drop of the last reference to a removed context panics if the drop of the context does.
pub struct CtxRef<T: Send + Sync + 'static> {
    slab: SlabPtr<T>,
    id: Id,
    _shares: PhantomData<std::sync::Arc<T>>,
}

// SAFETY: a `CtxRef` gives access to a `&T`, and the last one drops the `T` on its thread, so `T` must be
// `Send` and `Sync`, as for an `Arc`.
unsafe impl<T: Send + Sync + 'static> Send for CtxRef<T> {}
// SAFETY: a `&CtxRef` can be cloned on another thread, so `T` must be `Send` and `Sync`, as for an `Arc`.
unsafe impl<T: Send + Sync + 'static> Sync for CtxRef<T> {}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Takes a counted reference to the context of `id`.
    ///
    /// Wait-free, and writes to memory of this CPU only. The first reference to a context or its 63
    /// neighbours blocks shortly on the table's lock and allocates their counts.
    ///
    /// # Errors
    ///
    /// [`GetRefError::Lookup`] if the id names no live context, [`GetRefError::Alloc`] if there is no memory
    /// for the counts.
    #[inline]
    pub fn get_ref(&self, id: Id) -> Result<CtxRef<T>, GetRefError> {
        let _guard = rcu::pin();
        let core = self.core();
        // SAFETY: `_guard` is an RCU guard.
        let Some(slab) = (unsafe { core.slabs.slab(id.index()) }) else {
            // SAFETY: `_guard` is an RCU guard.
            return Err(GetRefError::Lookup(unsafe { core.slabs.lookup_error(id) }));
        };
        let Some(refs) = slab.refs() else {
            // SAFETY: `_guard` is an RCU guard.
            return unsafe { self.get_first_ref(id) };
        };
        let state = &slab.slot(id.index()).state;
        // The state is the gate of the count, which is open while it equals the id. The guard keeps the
        // count from being folded and opened again meanwhile.
        if refs.counts.try_get(number(id), state, id.to_bits()) {
            Ok(CtxRef { slab: NonNull::from(slab), id, _shares: PhantomData })
        } else {
            // SAFETY: `_guard` is an RCU guard.
            Err(GetRefError::Lookup(unsafe { core.slabs.lookup_error(id) }))
        }
    }

    /// Inserts a context and returns a counted reference to it. No other thread can remove the context
    /// before the reference is taken.
    ///
    /// # Errors
    ///
    /// The errors of [`insert`](Self::insert); [`Alloc`](crate::InsertRefused::Alloc) also if there is no
    /// memory for the counts.
    pub fn insert_ref(&self, value: T) -> Result<CtxRef<T>, InsertError<T>> {
        let core = self.core();
        let claim = match core.admit() {
            Ok(claim) => claim,
            Err(reason) => return Err(InsertError { value, reason }),
        };
        let (id, slab) = (claim.id(), claim.slab());
        // SAFETY: invariant 4 of `slab`: the claimed slot is used.
        let it = unsafe { slab.as_ref() };
        let refs = match it.refs().map_or_else(|| core.make_refs(it), Ok) {
            Ok(refs) => refs,
            Err(error) => {
                drop(claim);
                core.quota.give_back(1);
                return Err(InsertError { value, reason: InsertRefused::Alloc(error) });
            }
        };
        // The count is open, and the state is not the id yet: `get_more` counts in the atomic.
        refs.counts.get_more(number(id), &it.slot(id.index()).state, id.to_bits());
        claim.publish(value);
        Ok(CtxRef { slab, id, _shares: PhantomData })
    }

    /// Takes a reference after it has made the counts of the slab.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    #[cold]
    #[inline(never)]
    unsafe fn get_first_ref(&self, id: Id) -> Result<CtxRef<T>, GetRefError> {
        let core = self.core();
        // SAFETY: the caller holds a guard.
        let (slab, _) = unsafe { core.slabs.find(id) }?; // makes no counts for a wrong id
        core.make_refs(slab).map_err(GetRefError::Alloc)?;
        self.get_ref(id)
    }
}

fn number(id: Id) -> usize {
    id.index() as usize % SLOTS
}

impl<T: Send + Sync + 'static> Core<T> {
    #[cold]
    fn make_refs<'a>(&self, slab: &'a Slab<T>) -> Result<&'a Refs, AllocError> {
        let _state = self.lock();
        let refs = slab.make_refs()?;
        // Ordering: Release pairs with the Acquire in `restart_sections`; it carries the counts. The lock
        // orders them as well, so no model fails with a weaker store.
        self.has_refs.store(true, Ordering::Release);
        Ok(refs)
    }
}

impl<T: Send + Sync + 'static> CtxRef<T> {
    #[inline(always)]
    fn slab(&self) -> &Slab<T> {
        // SAFETY: invariant 4 of `slab`: the reference keeps its slot used.
        unsafe { self.slab.as_ref() }
    }

    #[inline(always)]
    fn slot(&self) -> &Slot<T> {
        self.slab().slot(self.id.index())
    }

    #[inline(always)]
    pub(super) fn refs(&self) -> &Refs {
        self.slab().refs().expect("the counts are made before the first reference")
    }

    pub(super) fn core(&self) -> &Core<T> {
        // SAFETY: the reference keeps its slot used, and a used slot keeps the core.
        unsafe { &*Core::of(self.slab()).as_ptr() }
    }

    /// Returns the id of the context.
    #[inline]
    #[must_use]
    pub fn id(this: &Self) -> Id {
        this.id
    }

    /// Returns whether the context was removed, so that only clones make new references. Wait-free.
    #[inline]
    #[must_use]
    pub fn is_removed(this: &Self) -> bool {
        // Ordering: Acquire pairs with the Release in `Slot::kill`, in `RetireLists::splice`, in
        // `kill_all`, `fold` and `reclaim_all`; it carries what the removing thread did before.
        let order = order!(Acquire, "is_removed: what came before the removal");
        this.slot().state.load(order) != this.id.to_bits()
    }
}

// The bounds are those of an `Arc`.
impl<T: RefUnwindSafe + Send + Sync + 'static> UnwindSafe for CtxRef<T> {}
impl<T: RefUnwindSafe + Send + Sync + 'static> RefUnwindSafe for CtxRef<T> {}

impl<T: Send + Sync + 'static> Deref for CtxRef<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the reference keeps the value from being dropped.
        unsafe { self.slot().value() }
    }
}

impl<T: Send + Sync + 'static> Clone for CtxRef<T> {
    #[inline]
    fn clone(&self) -> Self {
        self.refs().counts.get_more(number(self.id), &self.slot().state, self.id.to_bits());
        Self { ..*self }
    }
}

impl<T: Send + Sync + 'static> Drop for CtxRef<T> {
    #[inline]
    fn drop(&mut self) {
        let (refs, state) = (&self.refs().counts, &self.slot().state);
        // SAFETY: this reference is put once. The slab is not used after the put, unless this was the last
        // reference and the dead slot therefore belongs to this thread.
        let last = unsafe { RefBlock::put(refs, number(self.id), state, self.id.to_bits()) };
        if last {
            let core = Core::of(self.slab());
            // SAFETY: this thread has put the last reference to the dead slot, which keeps the core.
            unsafe { Core::last_put(core, self.slab, self.id.index()) };
        }
    }
}

impl<T: Send + Sync + fmt::Debug + 'static> fmt::Debug for CtxRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CtxRef").field("id", &self.id).field("context", &**self).finish()
    }
}
