//! References that outlive a guard.
//!
//! A reference is counted in a [`RefBlock`], 64 counts that a slab gets with its first reference: one
//! word for each slot on each CPU, changed by an rseq section that tests the slot's state in the same
//! breath. So taking and putting a reference of a live context writes nothing that another CPU
//! writes. The count is folded once, when the removed context is reclaimed ([`limbo`](super::retire));
//! after that the last put drops the context.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use percpu::sync::atomic::Ordering;
use percpu::{RefBlock, rcu};

use super::core::Core;
use super::ctx_table::CtxTable;
use super::error::{GetRefError, InsertError, WaitError};
use super::id::Id;
use super::slab::{SLOTS, Slab, SlabPtr, Slot};
use super::waiters::{Place, Waiters};

/// A counted reference to a context: keeps it, and the memory it is in, until it is dropped.
///
/// Not tied to a guard, nor to the table: it may go to other threads and live across `.await`. The
/// context may be removed meanwhile ([`is_removed`](Self::is_removed)), and the table dropped; the
/// last reference then drops the context.
///
/// Cloning and dropping are wait-free and write to this CPU's memory only, while the context is live.
///
/// # Panics
///
/// Its drop, with the panic of the context's drop, if this is the last reference of a removed one.
pub struct CtxRef<T: Send + Sync + 'static> {
    slab: SlabPtr<T>,
    id: Id,
    _shares: PhantomData<std::sync::Arc<T>>,
}

// SAFETY: a `CtxRef` gives `&T` and drops the `T` on the thread that drops the last one, so both are
// asked of `T`, as for an `Arc`.
unsafe impl<T: Send + Sync + 'static> Send for CtxRef<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync + 'static> Sync for CtxRef<T> {}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// A counted reference to the context of `id`.
    ///
    /// Wait-free, and writes to this CPU's memory only; but the first one to a context or its
    /// neighbours blocks shortly on the table's lock, and allocates their counts.
    ///
    /// # Errors
    ///
    /// [`GetRefError::Lookup`] if the id leads to nothing; the others only for a first reference.
    #[inline]
    pub fn get_ref(&self, id: Id) -> Result<CtxRef<T>, GetRefError> {
        let _guard = rcu::pin();
        let core = self.core();
        // SAFETY: the guard.
        let Some(slab) = (unsafe { core.slabs.slab(id.index()) }) else {
            // SAFETY: the guard.
            return Err(GetRefError::Lookup(unsafe { core.slabs.lookup_error(id) }));
        };
        let Some(refs) = slab.refs() else {
            // SAFETY: the guard.
            return unsafe { self.get_first_ref(id) };
        };
        let state = &slab.slot(id.index()).state;
        // Compares the state with the id. The guard keeps the count from being folded and opened
        // again meanwhile.
        if refs.try_get(number(id), state, id.to_bits()) {
            Ok(CtxRef { slab: NonNull::from(slab), id, _shares: PhantomData })
        } else {
            // SAFETY: the guard.
            Err(GetRefError::Lookup(unsafe { core.slabs.lookup_error(id) }))
        }
    }

    /// [`insert`](Self::insert), and a counted reference to what was inserted: nobody can remove it in
    /// between.
    ///
    /// # Errors
    ///
    /// As `insert`; [`Alloc`](super::InsertRefused::Alloc) also for want of memory for the counts.
    pub fn insert_ref(&self, value: T) -> Result<CtxRef<T>, InsertError<T>> {
        let core = self.core();
        let claim = match core.admit(0, u32::MAX, 1) {
            Ok(claim) => claim,
            Err(reason) => return Err(InsertError::new(value, reason)),
        };
        let (id, slab) = (claim.id(), claim.slab());
        // SAFETY: invariant 4 of `slab`: the claim's slot is used.
        let it = unsafe { slab.as_ref() };
        let refs = match it.refs().map_or_else(|| core.make_refs(it), Ok) {
            Ok(refs) => refs,
            Err(error) => {
                drop(claim);
                core.quota.give_back(1);
                return Err(InsertError::new(value, error.into()));
            }
        };
        // The count is open and the state is not the id yet: counted like one more after a removal.
        refs.get_more(number(id), &it.slot(id.index()).state, id.to_bits());
        claim.fill(value, 1);
        Ok(CtxRef { slab, id, _shares: PhantomData })
    }

    /// Removes a context, and gives a counted reference to it, by which the caller can go on using
    /// what nobody finds any more.
    ///
    /// The context is dropped when this and every other reference is gone. Of several threads that
    /// take or remove the same context one succeeds.
    ///
    /// # Errors
    ///
    /// As [`get_ref`](Self::get_ref); nothing was removed.
    pub fn take(&self, id: Id) -> Result<CtxRef<T>, GetRefError> {
        let taken = self.get_ref(id)?;
        self.remove(id)?;
        Ok(taken)
    }

    /// [`get_ref`](Self::get_ref) where the counts are not made yet.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    #[cold]
    #[inline(never)]
    unsafe fn get_first_ref(&self, id: Id) -> Result<CtxRef<T>, GetRefError> {
        let core = self.core();
        // SAFETY: the caller's guard.
        let (slab, _) = unsafe { core.slabs.find(id) }?; // no counts for an id that leads to nothing
        core.make_refs(slab)?;
        self.get_ref(id)
    }
}

fn number(id: Id) -> usize {
    id.index() as usize % SLOTS
}

impl<T: Send + Sync + 'static> Core<T> {
    #[cold]
    fn make_refs<'a>(&self, slab: &'a Slab<T>) -> Result<&'a RefBlock, GetRefError> {
        let _state = self.lock();
        let refs = slab.make_refs().map_err(GetRefError::Alloc)?;
        // Ordering: Release pairs with the Acquire in `restart_sections`.
        self.has_refs.store(true, Ordering::Release);
        Ok(refs)
    }
}

impl<T: Send + Sync + 'static> CtxRef<T> {
    #[inline(always)]
    fn slab(&self) -> &Slab<T> {
        // SAFETY: invariant 4 of `slab`: our reference keeps its slot used.
        unsafe { self.slab.as_ref() }
    }

    #[inline(always)]
    fn slot(&self) -> &Slot<T> {
        self.slab().slot(self.id.index())
    }

    #[inline(always)]
    fn refs(&self) -> &RefBlock {
        self.slab().refs().expect("made before the first reference")
    }

    fn waiters(&self) -> &Waiters {
        // SAFETY: our slot is used, which keeps the core.
        unsafe { &(*Core::of(self.slab()).as_ptr()).waiters }
    }

    /// What the context is, or was, named.
    #[inline]
    #[must_use]
    pub fn id(this: &Self) -> Id {
        this.id
    }

    /// Whether the context was removed: there will be no new references but clones. Wait-free.
    #[inline]
    #[must_use]
    pub fn is_removed(this: &Self) -> bool {
        // Ordering: Acquire pairs with the Release of the removal; it carries what was done before.
        this.slot().state.load(Ordering::Acquire) != this.id.to_bits()
    }

    /// Blocks until `look` gives something, or the context is removed.
    ///
    /// `look` is called again after each [`notify`](Self::notify), and whenever the table notifies
    /// somebody else; under no lock and no guard, so it may do with the table what it likes. Each call
    /// that changes something of the table has it called again.
    ///
    /// # Errors
    ///
    /// [`WaitError::Removed`]; `look` has given nothing by then, and is not asked any more.
    /// [`WaitError::Pinned`] if this thread holds an RCU guard: the wait would hold up every grace
    /// period.
    pub fn wait_until<R>(this: &Self, look: impl FnMut(&T) -> Option<R>) -> Result<R, WaitError> {
        Self::wait_deadline(this, None, look)
    }

    /// [`wait_until`](Self::wait_until), for `timeout` at most.
    ///
    /// # Errors
    ///
    /// As there, and [`WaitError::TimedOut`].
    pub fn wait_timeout<R>(
        this: &Self,
        timeout: Duration,
        look: impl FnMut(&T) -> Option<R>,
    ) -> Result<R, WaitError> {
        Self::wait_deadline(this, Instant::now().checked_add(timeout), look)
    }

    fn wait_deadline<R>(
        this: &Self,
        deadline: Option<Instant>,
        mut look: impl FnMut(&T) -> Option<R>,
    ) -> Result<R, WaitError> {
        if rcu::is_pinned() {
            return Err(WaitError::Pinned);
        }
        let waited = this.waiters().wait(deadline, || match look(this) {
            Some(got) => Some(Ok(got)),
            None => Self::is_removed(this).then_some(Err(WaitError::Removed)),
        });
        waited.unwrap_or(Err(WaitError::TimedOut))
    }

    /// Wakes who waits for something of a context of this table. Wait-free while nobody does.
    pub fn notify(this: &Self) {
        this.waiters().notify();
    }

    /// Is ready when the context is removed.
    pub fn removed(this: &Self) -> Killed<T> {
        Killed { of: this.clone(), place: Place::default() }
    }
}

// As for an `Arc`.
impl<T: RefUnwindSafe + Send + Sync + 'static> UnwindSafe for CtxRef<T> {}
impl<T: RefUnwindSafe + Send + Sync + 'static> RefUnwindSafe for CtxRef<T> {}

impl<T: Send + Sync + 'static> Deref for CtxRef<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: our reference keeps it from being dropped.
        unsafe { self.slot().value() }
    }
}

impl<T: Send + Sync + 'static> Clone for CtxRef<T> {
    #[inline]
    fn clone(&self) -> Self {
        self.refs().get_more(number(self.id), &self.slot().state, self.id.to_bits());
        Self { ..*self }
    }
}

impl<T: Send + Sync + 'static> Drop for CtxRef<T> {
    #[inline]
    fn drop(&mut self) {
        let (refs, state) = (self.refs(), &self.slot().state);
        // SAFETY: our reference, put once; nothing of the slab is used after it unless it was the
        // last, and the slot therefore ours.
        let last = unsafe { RefBlock::put(refs, number(self.id), state, self.id.to_bits()) };
        if last {
            let core = Core::of(self.slab());
            // SAFETY: the slot is used until it is vacated, and that keeps the core.
            unsafe { Core::last_put(core, self.slab, self.id.index()) };
        }
    }
}

impl<T: Send + Sync + fmt::Debug + 'static> fmt::Debug for CtxRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CtxRef").field("id", &self.id).field("context", &**self).finish()
    }
}

impl<T: Send + Sync + fmt::Display + 'static> fmt::Display for CtxRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Ready when a context is removed; holds a reference to it. From [`CtxRef::removed`].
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct Killed<T: Send + Sync + 'static> {
    of: CtxRef<T>,
    place: Place,
}

impl<T: Send + Sync + 'static> Future for Killed<T> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if CtxRef::is_removed(&this.of) {
            return Poll::Ready(());
        }
        let index = this.of.id.index();
        let registered = this.of.waiters().register(&mut this.place, Some(index), context.waker());
        if CtxRef::is_removed(&this.of) {
            return Poll::Ready(());
        }
        if !registered {
            context.waker().wake_by_ref(); // no memory to be woken by: look again soon
        }
        Poll::Pending
    }
}

impl<T: Send + Sync + 'static> Drop for Killed<T> {
    fn drop(&mut self) {
        self.of.waiters().leave(&mut self.place);
    }
}
