//! Removals, and waits for the drop of removed contexts.

use std::cell::Cell;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use percpu::rcu;
use percpu::sync::{WordGuard, order, thread};

use super::core::{Core, State};
use super::ctx_table::CtxTable;
use super::error::{RemoveError, WaitError};
use super::id::Id;
use super::pauses::Pauses;
use super::slab::{NotLive, SLAB_BITS, SLOTS};
use super::slab_tree::LAST_KEY;
use super::waiters::Registration;

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Removes a context. Every later lookup of `id` fails.
    ///
    /// One of several threads that remove the same context succeeds. Readers that found the context before
    /// can go on using it. It is dropped when no reader and no reference is left, by a later removal or
    /// insert, by [`poll`](Self::poll) or [`flush`](Self::flush), or by RCU (see [`crate::rcu::Bounds`]). The
    /// [`Removal`] can wait for the drop; dropping the `Removal` waits for nothing.
    ///
    /// Lock-free, and does not allocate, except that about one call in a thousand, and the first call after a
    /// pause, takes the lock and reclaims removed contexts.
    ///
    /// # Errors
    ///
    /// The errors of [`get`](Self::get).
    #[inline]
    pub fn remove(&self, id: Id) -> Result<Removal<'_, T>, RemoveError> {
        let core = self.core();
        if core.kill(id)? {
            core.advance_and_queue();
        }
        Ok(Removal { core, id })
    }

    /// Removes every context, and waits until all of them are dropped. Returns how many there were.
    ///
    /// Contexts that are inserted meanwhile may be removed or not. The table can be used afterwards.
    ///
    /// Blocks for one grace period, whatever the number of contexts, and until the last
    /// [`CtxRef`](super::CtxRef) of each context is dropped. A reference that the calling thread holds is
    /// not noticed: the wait for it does not end. A task calls `begin_remove_all().await` instead
    /// ([`begin_remove_all`](Self::begin_remove_all)). To refuse inserts meanwhile, call
    /// [`close`](Self::close) first.
    ///
    /// # Errors
    ///
    /// [`WaitError::Pinned`] or [`WaitError::InDrop`]; no context was removed.
    pub fn remove_all(&self) -> Result<usize, WaitError> {
        self.core().may_wait()?;
        let mut removal = self.begin_remove_all();
        removal.wait()?;
        Ok(removal.len())
    }

    /// Removes every context. Does not wait for readers. The [`RemoveAll`] can wait for the drops, by a
    /// blocking call or by `.await`.
    pub fn begin_remove_all(&self) -> RemoveAll<'_, T> {
        let core = self.core();
        let mut killed = 0;
        let mut from = 0;
        let last = core.slabs.last_key(); // bounds the loop: other threads may insert above it
        loop {
            let guard = rcu::pin();
            let Some((key, slab)) = core.slabs.next_slab(from, last) else { break };
            // SAFETY: invariant 4 of `slab`: the slab was found under `guard`.
            let it = unsafe { slab.as_ref() };
            // SAFETY: `guard` is an RCU guard.
            killed += unsafe { core.retire_all(it) };
            drop(guard);
            from = key + 1;
        }
        if killed != 0 {
            core.waiters.notify_all();
            core.advance_and_queue();
        }
        RemoveAll { core, killed, from: 0 }
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
        let mut removed = 0;
        let mut later = AdvanceLater { core, due: false };
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
                let Ok(advance) = core.kill(id) else { continue }; // another thread was faster
                removed += 1;
                later.due |= advance;
            }
        }
        removed
    }

    /// Reclaims the removed contexts that no reader uses any more, as far as their grace period has ended.
    /// Returns how many. Never blocks for a reader. Runs the drops of the contexts.
    pub fn poll(&self) -> usize {
        let core = self.core();
        let vacated = core.advance();
        // The first call may have started a grace period, which may have ended at once.
        if vacated == 0 { core.advance() } else { vacated }
    }

    /// Waits until every context that was removed before this call is dropped, except those that references
    /// keep. Returns how many this call dropped.
    ///
    /// Blocks for one or two grace periods.
    ///
    /// # Errors
    ///
    /// [`WaitError::Pinned`] if the calling thread holds an RCU guard, [`WaitError::InDrop`] if it is dropping
    /// a context of this table.
    pub fn flush(&self) -> Result<usize, WaitError> {
        self.core().flush()
    }
}

/// Advances reclaim when it is dropped, if a removal has asked for that: also after a panic.
struct AdvanceLater<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    due: bool,
}

impl<T: Send + Sync + 'static> Drop for AdvanceLater<'_, T> {
    fn drop(&mut self) {
        if self.due {
            self.core.advance_and_queue();
        }
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Makes a context dead and adds it to a list. Returns whether the caller must call
    /// `advance_and_queue`.
    #[inline]
    fn kill(&self, id: Id) -> Result<bool, RemoveError> {
        let guard = rcu::pin();
        // SAFETY: `guard` is an RCU guard.
        let (slab, slot) = unsafe { self.slabs.find(id) }?;
        if !slot.kill(id) {
            return Err(RemoveError::Stale);
        }
        // SAFETY: this thread has just made the slot dead, under `guard`.
        let must_advance = unsafe { self.retire(slab, slot, id) };
        drop(guard);
        self.waiters.notify_slot(id.index());
        Ok(must_advance)
    }

    /// Locks the state, if the calling thread may wait for the drop of contexts of this table.
    fn lock_to_wait(&self) -> Result<WordGuard<'_, State<T>>, WaitError> {
        if rcu::is_pinned() {
            return Err(WaitError::Pinned);
        }
        let state = self.lock();
        if self.is_in_drop() { Err(WaitError::InDrop) } else { Ok(state) }
    }

    /// Returns an error if the calling thread must not wait for the drop of contexts of this table.
    fn may_wait(&self) -> Result<(), WaitError> {
        self.lock_to_wait().map(drop)
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

    /// Blocks until `done` returns true. `blocked` returns whether only a reference keeps it from that.
    fn wait_done(
        &self,
        mut done: impl FnMut() -> bool,
        blocked: impl Fn() -> bool,
    ) -> Result<(), WaitError> {
        while !done() {
            self.may_wait()?;
            let vacated = self.flush()?;
            if done() {
                break;
            }
            if vacated == 0 {
                thread::yield_now(); // to a thread that has killed a slot and not added it to a list
            }
            self.waiters.wait(None, || (done() || !blocked()).then_some(()));
        }
        Ok(())
    }

    /// Waits like [`wait_done`](Self::wait_done), but for `timeout` at most: polls for the readers.
    fn wait_timeout(
        &self,
        timeout: Duration,
        mut done: impl FnMut() -> bool,
        blocked: impl Fn() -> bool,
    ) -> Result<(), WaitError> {
        let Some(deadline) = Instant::now().checked_add(timeout) else {
            return self.wait_done(done, blocked);
        };
        // A reader wakes no waiter when it leaves, so this polls, with growing pauses.
        let mut step = Duration::from_micros(10);
        loop {
            if done() {
                return Ok(());
            }
            self.may_wait()?;
            self.advance();
            if done() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(WaitError::TimedOut);
            }
            if blocked() {
                // The drop of the last reference wakes it.
                let unblocked = || (done() || !blocked()).then_some(());
                self.waiters.wait(Some(deadline), unblocked);
            } else {
                let until = (now + step).min(deadline);
                self.waiters.wait(Some(until), || done().then_some(()));
                step = (step * 2).min(Duration::from_millis(1));
            }
        }
    }

    /// Polls a future that is ready when `done` returns true. It waits for `slot`, or for the whole table.
    /// `blocked` returns whether only a reference keeps it from that.
    fn poll_done(
        &self,
        registration: &mut Registration,
        pauses: &mut Pauses,
        slot: Option<u32>,
        context: &mut Context<'_>,
        done: impl Fn() -> bool,
        blocked: impl Fn() -> bool,
    ) -> Poll<Result<(), WaitError>> {
        self.advance();
        if done() {
            return Poll::Ready(Ok(()));
        }
        self.may_wait()?;
        let registered = self.waiters.register(registration, slot, context.waker());
        if done() {
            return Poll::Ready(Ok(()));
        }
        let blocked = blocked();
        // A reader wakes no waiter when it leaves, so the task polls again.
        if !registered || !blocked {
            pauses.wake_later(context.waker());
        }
        Poll::Pending
    }
}

/// A removed context, for a wait until it is dropped. Returned by [`CtxTable::remove`].
///
/// `removal.await` waits as a [`RemovalFuture`]. Dropping a `Removal` waits for nothing.
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
    /// Returns the id of the removed context.
    #[must_use]
    pub fn id(&self) -> Id {
        self.id
    }

    /// Returns whether the context is dropped. Advances reclaim like [`CtxTable::poll`]; never blocks.
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
    /// The errors of [`CtxTable::flush`]. A reference that the calling thread holds is not noticed: the wait
    /// for it does not end.
    pub fn wait(&self) -> Result<(), WaitError> {
        let Self { core, id } = self;
        core.wait_done(|| core.is_reclaimed(*id), || core.is_referenced(*id))
    }

    /// Blocks until the context is dropped, for `timeout` at most.
    ///
    /// # Errors
    ///
    /// [`WaitError::TimedOut`], and the errors of [`CtxTable::flush`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<(), WaitError> {
        let Self { core, id } = self;
        core.wait_timeout(timeout, || core.is_reclaimed(*id), || core.is_referenced(*id))
    }
}

impl<'a, T: Send + Sync + 'static> IntoFuture for Removal<'a, T> {
    type Output = Result<(), WaitError>;
    type IntoFuture = RemovalFuture<'a, T>;

    fn into_future(self) -> RemovalFuture<'a, T> {
        RemovalFuture {
            removal: self,
            registration: Registration::default(),
            pauses: Pauses::default(),
        }
    }
}

/// A future that is ready when a removed context is dropped. Made from a [`Removal`].
///
/// ```
/// async fn close(table: &radix_ctx::CtxTable<String>, id: radix_ctx::Id) -> std::io::Result<()> {
///     table.remove(id)?.await?; // a `RemovalFuture`
///     Ok(()) // no reader has the context any more
/// }
/// ```
///
/// The future may be dropped at any time: the context stays removed, and is dropped as if no task had
/// waited. A [`CtxRef`](super::CtxRef) of the context that the task itself holds is not noticed: the wait
/// for it does not end, so drop it first.
///
/// The drop of the last reference wakes the task. A reader wakes no task when it leaves, so while readers
/// use the context the task is polled again, after pauses of up to a millisecond. One thread sleeps for
/// all such pauses of the process. It runs while it is needed and for a second after that.
///
/// # Errors
///
/// The errors of [`Removal::wait`], returned by the poll: a task that polls with an RCU guard, or in the
/// drop of a context, may be what it waits for.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct RemovalFuture<'a, T: Send + Sync + 'static> {
    removal: Removal<'a, T>,
    registration: Registration,
    pauses: Pauses,
}

impl<T: Send + Sync + 'static> Future for RemovalFuture<'_, T> {
    type Output = Result<(), WaitError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { removal: Removal { core, id }, registration, pauses } = self.get_mut();
        let (done, blocked) = (|| core.is_reclaimed(*id), || core.is_referenced(*id));
        core.poll_done(registration, pauses, Some(id.index()), context, done, blocked)
    }
}

impl<T: Send + Sync + 'static> Drop for RemovalFuture<'_, T> {
    fn drop(&mut self) {
        self.removal.core.waiters.leave(&mut self.registration);
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
/// A wait may include contexts that other threads remove meanwhile. `closing.await` waits as a
/// [`RemoveAllFuture`].
///
/// ```
/// use radix_ctx::CtxTable;
///
/// let table = CtxTable::new();
/// for name in ["alice", "bob"] {
///     table.insert(name)?;
/// }
/// let mut closing = table.begin_remove_all();
/// assert_eq!(closing.len(), 2); // lookups fail from now on
/// closing.wait()?; // both are dropped
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RemoveAll<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    killed: usize,
    /// The contexts below this index are dropped, or were removed later.
    from: u64,
}

impl<T: Send + Sync + 'static> RemoveAll<'_, T> {
    /// Returns how many contexts were removed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.killed
    }

    /// Returns whether no context was removed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.killed == 0
    }

    /// Returns whether all removed contexts are dropped. Advances reclaim; never blocks.
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
    /// The errors of [`CtxTable::flush`].
    pub fn wait(&mut self) -> Result<(), WaitError> {
        let (core, from) = (self.core, Cell::new(self.from));
        let waited = core.wait_done(|| core.is_clear(&from), || core.is_referenced_at(from.get()));
        self.from = from.get();
        waited
    }

    /// Blocks until all removed contexts are dropped, for `timeout` at most.
    ///
    /// # Errors
    ///
    /// [`WaitError::TimedOut`], and the errors of [`CtxTable::flush`].
    pub fn wait_timeout(&mut self, timeout: Duration) -> Result<(), WaitError> {
        let (core, from) = (self.core, Cell::new(self.from));
        let blocked = || core.is_referenced_at(from.get());
        let waited = core.wait_timeout(timeout, || core.is_clear(&from), blocked);
        self.from = from.get();
        waited
    }
}

impl<T: Send + Sync + 'static> Core<T> {
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

    fn is_referenced_at(&self, index: u64) -> bool {
        self.not_live(index as u32).is_some_and(NotLive::is_referenced)
    }
}

impl<'a, T: Send + Sync + 'static> IntoFuture for RemoveAll<'a, T> {
    type Output = Result<usize, WaitError>;
    type IntoFuture = RemoveAllFuture<'a, T>;

    fn into_future(self) -> RemoveAllFuture<'a, T> {
        RemoveAllFuture {
            removal: self,
            registration: Registration::default(),
            pauses: Pauses::default(),
        }
    }
}

/// A future that is ready when all removed contexts are dropped, with their number. Made from a
/// [`RemoveAll`]. Wakes and fails like a [`RemovalFuture`].
///
/// ```
/// use radix_ctx::{CtxTable, WaitError};
///
/// async fn close(table: &CtxTable<String>) -> Result<usize, WaitError> {
///     table.begin_remove_all().await // the number of contexts, when all are dropped
/// }
/// ```
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct RemoveAllFuture<'a, T: Send + Sync + 'static> {
    removal: RemoveAll<'a, T>,
    registration: Registration,
    pauses: Pauses,
}

impl<T: Send + Sync + 'static> Future for RemoveAllFuture<'_, T> {
    type Output = Result<usize, WaitError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { removal: RemoveAll { core, killed, from }, registration, pauses } =
            self.get_mut();
        let at = Cell::new(*from);
        let (done, blocked) = (|| core.is_clear(&at), || core.is_referenced_at(at.get()));
        let polled = core.poll_done(registration, pauses, None, context, done, blocked);
        *from = at.get();
        polled.map_ok(|()| *killed)
    }
}

impl<T: Send + Sync + 'static> Drop for RemoveAllFuture<'_, T> {
    fn drop(&mut self) {
        self.removal.core.waiters.leave(&mut self.registration);
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for RemoveAll<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoveAll").field("killed", &self.killed).finish_non_exhaustive()
    }
}
