//! Removals: what a removal does itself, and the waits for what follows.
//!
//! A removal makes the slot's state dead and adds the slot to a list of its CPU. The link of a list is in
//! the slot's state, so a list takes no memory. The rest is done for many slots at once, after a grace
//! period ([`reclaim`](crate::reclaim), whose invariants hold here, too):
//!
//! ```text
//!  cpu 0: filling -> s -> s -> s      under the lock, if nothing waits:
//!  cpu 1: filling -> s                filling -> waiting, for a new grace period
//! ```
//!
//! | what happens | when | by |
//! |---|---|---|
//! | the context is dead, its slot in a list | in the call, under a guard | `Core::kill`: `SlabTree::find`, `Slot::kill`, `RetireLists::splice`, `take_tasks` |
//! | tasks wake; a full list advances reclaim | in the call | `after_removal`, `Core::advance` |
//! | the lists wait for a grace period, the callback is queued | in an `advance`, if nothing waits | `close_lists`, `RetireLists::close`, `queue` |
//! | each value is dropped | after the period, in the callback or another `advance` | `Reclaiming::run`, `reclaim`, `Waiting::take_next`, `fold`, `finish` |
//! | the slots are vacant | at the end of that reclaim | `VacatedSlots::end`, `empty_queue`, `mark_vacant` |
//! | the same for one slot with references | in the drop of the last one | `last_put`, `LastPut`, `vacate`, `settle` |
//!
//! A task waits in the [`WaitSet`] of its slab. The first one of
//! a table sets `has_tasks`, so a removal costs a load while no task has ever waited:
//!
//! ```text
//!   first task                 removing thread
//!   has_tasks = true           make the slot dead
//!   heavy()                    light()
//!   removed? else wait         has_tasks? look at the waiters of the slab
//! ```

use std::cell::Cell;
use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::time::{Duration, Instant};

use offlock_percpu::fence::{heavy, light};
use offlock_percpu::rcu;
use offlock_sync::atomic::Ordering;
use offlock_sync::{Wakers, check, fence, order, step, thread};

use crate::core::{Core, LANES, RetireLists};
use crate::error::{LookupError, WaitError};
use crate::id::Id;
use crate::reference::CtxRef;
use crate::slab::{LAST_KEY, NO_LINK, NotLive, SLAB_BITS, SLOTS, Slab};
use crate::table::CtxTable;

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Removes a context. Every later lookup of `id` fails.
    ///
    /// One of several threads that remove the same context succeeds. Readers that found the context before
    /// can go on using it. It is dropped when no reader and no reference is left, by a later removal or
    /// insert, by [`flush`](Self::flush), or by RCU ([`rcu::poll`]). The [`Removal`] can wait for the
    /// drop; dropping the `Removal` waits for nothing.
    ///
    /// Allocates only if tasks wait for the removal. Lock-free, with the exceptions in the table of the [crate's page](crate#progress).
    ///
    /// # Errors
    ///
    /// [`LookupError`] as for [`get`](Self::get).
    #[inline]
    pub fn remove(&self, id: Id) -> Result<Removal<'_, T>, LookupError> {
        let core = self.core();
        core.after_removal(core.kill(id)?);
        Ok(Removal { core, id })
    }

    /// Removes every context, and waits until all of them are dropped. Returns how many there were.
    ///
    /// Contexts that are inserted meanwhile may be removed or not. The table can be used afterwards.
    ///
    /// Blocks for one grace period, whatever the number of contexts, and until the last
    /// [`CtxRef`](crate::CtxRef) of each context is dropped. The wait may include contexts that other threads
    /// insert and remove meanwhile, so it need not end before they stop. A reference that the calling thread
    /// holds is not noticed: the wait for it does not end.
    ///
    /// # Errors
    ///
    /// [`WaitError::Pinned`] or [`WaitError::InDrop`]; no context was removed.
    pub fn remove_all(&self) -> Result<usize, WaitError> {
        self.core().may_wait()?;
        let mut removal = self.begin_remove_all();
        removal.wait()?;
        Ok(removal.count())
    }

    /// Removes every context. Does not wait for readers. The [`RemoveAll`] can wait for the drops.
    pub fn begin_remove_all(&self) -> RemoveAll<'_, T> {
        let core = self.core();
        let _later = QueueLater(core); // wakers may panic
        let mut removed = 0;
        let mut from = 0;
        let last = core.slabs.tree().last_key(); // bounds the loop: other threads may insert above it
        loop {
            let guard = rcu::pin();
            let Some((key, slab)) = core.slabs.next_slab(from, last) else { break };
            // SAFETY: invariant 4 of `slab`: the slab was found under `guard`.
            let it = unsafe { slab.as_ref() };
            // SAFETY: `guard` is an RCU guard.
            let (killed, tasks) = unsafe { core.kill_all(it) };
            drop(guard);
            tasks.into_iter().for_each(Wakers::wake);
            removed += killed;
            from = key + 1;
        }
        core.after_removal(AfterRemoval { advance: removed != 0, tasks: None });
        RemoveAll { core, removed, from: 0 }
    }

    /// Removes the contexts for which `keep` returns false. Returns how many this call removed.
    ///
    /// Calls `keep` once for each context that is live throughout, ascending by index. A context that is
    /// inserted meanwhile may be skipped. `keep` runs under an RCU guard, so it must not wait for the table.
    /// If it panics, the contexts that were removed before stay removed. Does not wait for readers.
    ///
    /// ```
    /// use radix_ctx::CtxTable;
    ///
    /// let requests = CtxTable::new();
    /// for age in [3, 70, 5] {
    ///     requests.insert(age)?;
    /// }
    /// assert_eq!(requests.retain(|_id, age| *age < 60), 1);
    /// assert_eq!(requests.len(), 2);
    /// # Ok::<(), radix_ctx::InsertError<i32>>(())
    /// ```
    pub fn retain(&self, mut keep: impl FnMut(Id, &T) -> bool) -> usize {
        let core = self.core();
        let _later = QueueLater(core); // `keep` may panic
        let (mut removed, mut advance) = (0, false);
        let mut from = Some(0);
        while let Some(index) = from {
            // A guard for each batch, so that a long table does not delay grace periods.
            let mut refused = [None; SLOTS];
            let guard = rcu::pin();
            let mut contexts = self.iter_from(index, &guard);
            for (refused, (id, context)) in refused.iter_mut().zip(contexts.by_ref()) {
                *refused = (!keep(id, context)).then_some(id);
            }
            from = contexts.next_index();
            drop(guard);
            for id in refused.into_iter().flatten() {
                let Ok(after) = core.kill(id) else { continue }; // another thread was faster
                removed += 1;
                advance |= after.advance;
                core.after_removal(AfterRemoval { advance: false, ..after });
            }
        }
        core.after_removal(AfterRemoval { advance, tasks: None });
        removed
    }

    /// Waits until every context that was removed before this call is dropped, except those that references
    /// keep. Returns how many this call dropped.
    ///
    /// Blocks for one or two grace periods.
    ///
    /// # Errors
    ///
    /// [`WaitError::Pinned`] or [`WaitError::InDrop`].
    pub fn flush(&self) -> Result<usize, WaitError> {
        self.core().flush(|| false)
    }
}

/// The steps of a removal that run user code. They follow the end of its guard.
#[must_use]
#[derive(Default)]
struct AfterRemoval {
    /// Reclaim must advance, and the callback be queued.
    advance: bool,
    /// The tasks that wait for the removal.
    tasks: Option<Wakers>,
}

/// On drop, queues the reclaim callback, unless it is queued or the lists are empty. A thread that has added a
/// slot to a list must do that, also if user code panics.
struct QueueLater<'a, T: Send + Sync + 'static>(&'a Core<T>);

impl<T: Send + Sync + 'static> Drop for QueueLater<'_, T> {
    fn drop(&mut self) {
        if self.0.claim_callback() {
            self.0.queue_callback();
        }
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Makes a context dead and adds its slot to a list. The caller does the rest in [`AfterRemoval`].
    #[inline]
    fn kill(&self, id: Id) -> Result<AfterRemoval, LookupError> {
        let _guard = rcu::pin(); // until the link is stored: invariant 1 of `reclaim`
        // SAFETY: `_guard` is an RCU guard.
        let (slab, slot) = unsafe { self.slabs.find(id) }?;
        if !slot.kill(id) {
            return Err(LookupError::Stale);
        }
        self.quota.give_back(1);
        let Some(lists) = self.lists.get() else {
            return Ok(AfterRemoval::default()); // always `Some` here: making the first slab creates the lists
        };
        // SAFETY: this thread has just made the slot dead, under `_guard`.
        let length = unsafe { lists.local().splice(1, id.index(), slot, id) };
        // Pairs with the `heavy` in the end of the callback: either the callback sees the slot, or this
        // thread sees `callback_queued == false` and queues the callback.
        step!("retire: the slot is in its list before the look for the callback", light());
        // Ordering: Relaxed, both; a hint, and ordered by the fence.
        let batch = self.batch.load(Ordering::Relaxed);
        let advance = length & (batch - 1) == 0 || !self.callback_queued.load(Ordering::Relaxed);
        Ok(AfterRemoval { advance, tasks: self.take_tasks(slab, Some(id.index())) })
    }

    /// Makes every live slot of a slab dead and adds them to lists. Returns how many there were, and the
    /// tasks that wait for them.
    ///
    /// If there were any, reclaim must advance, and the callback be queued, after the guard has ended.
    ///
    /// # Safety
    ///
    /// The caller holds an RCU guard.
    unsafe fn kill_all(&self, slab: &Slab<T>) -> (usize, Option<Wakers>) {
        let Some(lists) = self.lists.get() else {
            return (0, None); // always `Some` here: making the first slab creates the lists
        };
        let lists = lists.local();
        let mut killed = 0;
        for lane in 0..LANES {
            let (mut first, mut last, mut count) = (NO_LINK, None, 0);
            for at in (lane..SLOTS).step_by(LANES) {
                let slot = slab.slot(at as u32);
                // Ordering: Relaxed; the exchange in `kill` checks it.
                let state = slot.state.load(Ordering::Relaxed);
                if NotLive::read(state).is_some() || !slot.kill(Id::from_live(state)) {
                    continue;
                }
                let id = Id::from_live(state);
                // Ordering: Release, like the store of the link in `RetireLists::splice`.
                let order = order!(Release, "retire all: the link carries what came before");
                slot.state.store(NotLive::dead(id, first).bits(), order);
                first = id.index();
                last = last.or(Some((slot, id)));
                count += 1;
            }
            if let Some((slot, id)) = last {
                // SAFETY: the slots were made dead above, under the caller's guard, and are linked.
                unsafe { lists.splice(count, first, slot, id) };
                killed += count as usize;
            }
        }
        self.quota.give_back(killed as u64);
        (killed, if killed == 0 { None } else { self.take_tasks(slab, None) })
    }

    /// Ends the waits of the tasks for the removal of one context of a slab, or of all, and returns their
    /// wakers. The calling thread has removed the context.
    #[inline]
    pub(super) fn take_tasks(&self, slab: &Slab<T>, index: Option<u32>) -> Option<Wakers> {
        // Pairs with the `heavy` in `removed`: the task sees the removal, or this thread sees the mark.
        step!("remove: the slot is dead before the look for tasks", light());
        // Ordering: Relaxed; the fences order it.
        if check!("remove: no task waits", !self.has_tasks.load(Ordering::Relaxed)) {
            return None;
        }
        // Ordering: SeqCst fence, against the one of `Waiter::poll`: the task sees the removal, or this
        // thread sees its waiter, and so the `Refs` that it is in.
        fence!(SeqCst, "remove: the slot is dead before the look at the references");
        Some(slab.refs()?.removed.take(index.map(u64::from))).filter(|tasks| !tasks.is_empty())
    }

    /// Wakes the tasks that wait for a removal, and advances reclaim if the removal has asked for that. The
    /// calling thread holds no guard.
    #[inline]
    fn after_removal(&self, after: AfterRemoval) {
        if after.advance || after.tasks.is_some() {
            self.after_removal_slow(after);
        }
    }

    #[cold]
    #[inline(never)]
    fn after_removal_slow(&self, AfterRemoval { advance, tasks }: AfterRemoval) {
        let _later = advance.then(|| QueueLater(self)); // user code may panic
        tasks.into_iter().for_each(Wakers::wake);
        if advance {
            self.advance();
        }
    }

    /// Iterates over the lists of every CPU. There are none before the first slab.
    pub(super) fn all_lists(&self) -> impl Iterator<Item = &RetireLists> {
        self.lists.get().into_iter().flat_map(|lists| lists.iter()).map(|(_, lists)| lists)
    }

    /// Returns the number of slots in the filling lists. Wait-free. Exact only if the removals
    /// happen before this call.
    pub(super) fn filled(&self) -> u64 {
        self.all_lists().map(RetireLists::filled).sum()
    }

    /// Returns an error if the calling thread must not wait for the drop of contexts of this table.
    fn may_wait(&self) -> Result<(), WaitError> {
        if rcu::is_pinned() {
            return Err(WaitError::Pinned);
        }
        if self.is_in_drop() { Err(WaitError::InDrop) } else { Ok(()) }
    }

    /// Returns whether the context of `id`, which was removed, is dropped.
    fn is_reclaimed(&self, id: Id) -> bool {
        let gone = self.not_live(id.index());
        gone.is_none_or(|gone| !(gone.is_dead() && gone.next() == id.generation() + 1))
    }

    /// Returns whether references alone keep the context of `id`, which was removed.
    fn is_referenced(&self, id: Id) -> bool {
        self.not_live(id.index())
            .is_some_and(|gone| gone.is_referenced() && gone.next() == id.generation() + 1)
    }

    /// Returns the state of the slot of an index, or `None` if it is live or there is no slot.
    fn not_live(&self, index: u32) -> Option<NotLive> {
        let _guard = rcu::pin();
        // SAFETY: `_guard` is an RCU guard.
        let slab = unsafe { self.slabs.slab(index) }?;
        // Ordering: Acquire pairs with the Release in `Core::finish`; it carries the drop of the value.
        let order = order!(Acquire, "is_done: the drop has ended");
        NotLive::read(slab.slot(index).state.load(order))
    }

    /// Blocks until `done` returns true, or until the deadline. `blocked` returns whether only references keep
    /// the context alive.
    fn wait(
        &self,
        deadline: Option<Instant>,
        mut done: impl FnMut() -> bool,
        blocked: impl Fn() -> bool,
    ) -> Result<(), WaitError> {
        let mut pause = Duration::from_micros(10);
        while !done() {
            self.may_wait()?;
            let vacated = if deadline.is_some() { self.advance() } else { self.flush(&mut done)? };
            if done() {
                break;
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(WaitError::TimedOut);
            }
            if blocked() {
                // The drop of the last reference wakes it.
                self.changes.wait(deadline, || (done() || !blocked()).then_some(()));
            } else if let Some(deadline) = deadline {
                // A reader wakes no waiter when it leaves, so this polls, with growing pauses.
                let until = (Instant::now() + pause).min(deadline);
                self.changes.wait(Some(until), || done().then_some(()));
                pause = (pause * 2).min(Duration::from_millis(1));
            } else if vacated == 0 {
                thread::yield_now(); // to a thread that has killed a slot and not added it to a list
            }
        }
        Ok(())
    }

    /// Moves `from` to the first removed context that is not dropped. Returns true if there is none.
    fn is_clear(&self, from: &Cell<u64>) -> bool {
        let _guard = rcu::pin();
        while let Some((key, slab)) = self.slabs.next_slab(from.get() >> SLAB_BITS, LAST_KEY) {
            // SAFETY: invariant 4 of `slab`: the slab was found under `guard`.
            let it = unsafe { slab.as_ref() };
            let first = u64::from(it.index(0)).max(from.get());
            for index in first..(key + 1) << SLAB_BITS {
                // Ordering: Acquire pairs with the Release in `Core::finish`; it carries the drop.
                let order = order!(Acquire, "remove all: the drops have ended");
                let state = it.slot(index as u32).state.load(order);
                if NotLive::read(state).is_some_and(NotLive::is_dead) {
                    from.set(index);
                    return false;
                }
            }
            from.set((key + 1) << SLAB_BITS);
        }
        true
    }
}

impl<T: Send + Sync + 'static> CtxRef<T> {
    /// Waits until the context is removed. The future may be dropped at any time.
    ///
    /// ```
    /// use std::pin::pin;
    /// use std::task::{Context, Waker};
    ///
    /// use radix_ctx::{CtxRef, CtxTable};
    ///
    /// let table = CtxTable::new();
    /// let context = table.insert_ref("alice")?;
    /// let mut removed = pin!(CtxRef::removed(&context)); // in a task: `CtxRef::removed(&context).await`
    /// let mut task = Context::from_waker(Waker::noop());
    /// assert!(removed.as_mut().poll(&mut task).is_pending());
    /// table.remove(CtxRef::id(&context))?;
    /// assert!(removed.poll(&mut task).is_ready());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn removed(this: &Self) {
        let (core, refs) = (this.core(), this.refs());
        {
            let _state = core.lock(); // so that the fence of the first task comes before every other task
            // Ordering: Relaxed, both; under the lock, and ordered by the fence.
            if !core.has_tasks.load(Ordering::Relaxed) {
                core.has_tasks.store(true, Ordering::Relaxed);
                // Pairs with the `light` of a thread that removes a context.
                step!("removed: the mark comes before the look at the context", heavy());
            }
        }
        let mut waiter = pin!(refs.removed.waiter_for(Self::id(this).index().into()));
        let is_removed = || Self::is_removed(this).then_some(());
        poll_fn(|context| waiter.as_mut().poll(context, is_removed)).await;
    }
}

/// A removed context, for a wait until it is dropped. Returned by [`CtxTable::remove`].
///
/// Dropping a `Removal` waits for nothing. A task calls [`is_done`](Self::is_done) after pauses of its
/// runtime's timer.
///
/// ```
/// use radix_ctx::CtxTable;
///
/// let table = CtxTable::new();
/// let id = table.insert(Box::new(7))?;
/// let removal = table.remove(id)?;
/// removal.wait()?; // no reader and no reference is left: the box is freed
/// assert!(removal.is_done());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Removal<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    id: Id,
}

impl<T: Send + Sync + 'static> Removal<'_, T> {
    /// Returns whether the context is dropped. If it is not, reclaims the removed contexts that no reader
    /// uses any more: takes the table's lock and runs their drops. Never waits for a reader.
    #[must_use]
    pub fn is_done(&self) -> bool {
        if !self.core.is_reclaimed(self.id) {
            self.core.advance();
        }
        self.core.is_reclaimed(self.id)
    }

    /// Blocks until the context is dropped.
    ///
    /// # Errors
    ///
    /// [`WaitError::Pinned`] or [`WaitError::InDrop`]. A reference that the calling thread holds is not
    /// noticed: the wait for it does not end.
    pub fn wait(&self) -> Result<(), WaitError> {
        let Self { core, id } = self;
        core.wait(None, || core.is_reclaimed(*id), || core.is_referenced(*id))
    }

    /// Blocks until the context is dropped, or until the deadline.
    ///
    /// # Errors
    ///
    /// Any [`WaitError`].
    pub fn wait_deadline(&self, deadline: Instant) -> Result<(), WaitError> {
        let Self { core, id } = self;
        core.wait(Some(deadline), || core.is_reclaimed(*id), || core.is_referenced(*id))
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Removal<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Removal").field(&self.id).finish()
    }
}

/// The removed contexts of a table, for a wait until they are dropped. Returned by
/// [`CtxTable::begin_remove_all`].
///
/// A wait may include contexts that other threads remove meanwhile.
///
/// ```
/// use radix_ctx::CtxTable;
///
/// let table = CtxTable::new();
/// for name in ["alice", "bob"] {
///     table.insert(name)?;
/// }
/// let mut closing = table.begin_remove_all();
/// assert_eq!(closing.count(), 2); // lookups fail from now on
/// closing.wait()?; // both are dropped
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RemoveAll<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    removed: usize,
    /// The contexts below this index are dropped, or were removed later.
    from: u64,
}

impl<T: Send + Sync + 'static> RemoveAll<'_, T> {
    /// Returns how many contexts were removed.
    #[must_use]
    pub fn count(&self) -> usize {
        self.removed
    }

    /// Returns whether all removed contexts are dropped. Advances reclaim like [`Removal::is_done`].
    #[must_use]
    pub fn is_done(&mut self) -> bool {
        self.core.advance();
        let from = Cell::new(self.from);
        let clear = self.core.is_clear(&from);
        self.from = from.get();
        clear
    }

    /// Blocks until all removed contexts are dropped.
    ///
    /// # Errors
    ///
    /// Those of [`Removal::wait`].
    pub fn wait(&mut self) -> Result<(), WaitError> {
        let (core, from) = (self.core, Cell::new(self.from));
        let blocked = || core.not_live(from.get() as u32).is_some_and(NotLive::is_referenced);
        let waited = core.wait(None, || core.is_clear(&from), blocked);
        self.from = from.get();
        waited
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for RemoveAll<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoveAll").field("removed", &self.removed).finish_non_exhaustive()
    }
}
