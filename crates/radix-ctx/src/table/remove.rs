//! How contexts go, and how that is waited for.

use std::cell::Cell;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use percpu::rcu;
use percpu::sync::atomic::Ordering;
use percpu::sync::{WordGuard, thread};

use super::core::{Core, State};
use super::ctx_table::CtxTable;
use super::error::{RemoveError, WaitError};
use super::id::Id;
use super::slab::{NotLive, SLAB_BITS};
use super::slab_tree::LAST_KEY;
use super::waiters::Place;

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Removes a context: from now on every lookup of `id` fails, for ever.
    ///
    /// Of several threads that remove the same context one succeeds. Who found the context before
    /// goes on using it; it is dropped when there is no reader left and no reference, by whoever
    /// moves reclaim on then: a later removal or insert, [`poll`](Self::poll),
    /// [`flush`](Self::flush), or RCU on its own occasions (see [`crate::rcu::Bounds`]). To wait for
    /// that, ask the [`Removal`]; to drop it waits for nothing.
    ///
    /// Lock-free, and allocates nothing, but for every thousandth or so, which reclaims what others
    /// have removed.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    #[inline]
    pub fn remove(&self, id: Id) -> Result<Removal<'_, T>, RemoveError> {
        let core = self.core();
        if core.kill(id)? {
            core.advance_and_queue();
        }
        Ok(Removal { core, id })
    }

    /// Removes every context, and waits until all of them are dropped: one grace period, whatever
    /// their number. Returns how many there were.
    ///
    /// Contexts that are inserted meanwhile may be removed or not; the table can be used on.
    ///
    /// Blocks: for readers, and until the last [`CtxRef`](super::CtxRef) of each context is gone.
    ///
    /// # Errors
    ///
    /// [`WaitError::Pinned`], [`WaitError::InDrop`]: nothing was removed.
    pub fn close_all(&self) -> Result<usize, WaitError> {
        self.core().may_wait()?;
        let mut closing = self.kill_all();
        closing.wait()?;
        Ok(closing.len())
    }

    /// Removes every context and waits for none. Blocks on no reader.
    pub fn kill_all(&self) -> Closing<'_, T> {
        let core = self.core();
        let mut killed = 0;
        let mut from = 0;
        let last = core.slabs.last_key(); // others may insert above it for ever
        loop {
            let guard = rcu::pin();
            let Some((key, slab)) = core.slabs.next_slab(from, last) else { break };
            // SAFETY: invariant 4 of `slab`: found under the guard.
            let it = unsafe { slab.as_ref() };
            // SAFETY: the guard.
            killed += unsafe { core.retire_all(it) };
            drop(guard);
            from = key + 1;
        }
        if killed != 0 {
            core.waiters.notify_all();
            core.advance_and_queue();
        }
        Closing { core, killed, from: 0 }
    }

    /// Moves reclaim on as far as readers let it, and returns how many indexes came free. Never
    /// blocks on a reader; runs drops of removed contexts.
    pub fn poll(&self) -> usize {
        let core = self.core();
        let vacated = core.advance();
        // What was only begun, as a grace period, may be over at once.
        if vacated == 0 { core.advance() } else { vacated }
    }

    /// Waits until every context that was removed before, and has no reference any more, is dropped;
    /// returns how many indexes came free by that.
    ///
    /// Blocks for one or two grace periods.
    ///
    /// # Errors
    ///
    /// [`WaitError::Pinned`] if this thread holds an RCU guard, [`WaitError::InDrop`] if it is dropping
    /// a context of this table.
    pub fn flush(&self) -> Result<usize, WaitError> {
        self.core().flush()
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Makes a context dead and puts it on a list. True if the lists deserve a look.
    #[inline]
    fn kill(&self, id: Id) -> Result<bool, RemoveError> {
        let guard = rcu::pin();
        // SAFETY: the guard.
        let (slab, slot) = unsafe { self.slabs.find(id) }?;
        if !slot.kill(id) {
            return Err(RemoveError::Stale);
        }
        // SAFETY: killed just now, under the guard.
        let look = unsafe { self.retire(slab, slot, id) };
        drop(guard);
        self.waiters.notify_slot(id.index());
        Ok(look)
    }

    /// The lock, if this thread may wait for contexts of this table to go.
    fn lock_to_wait(&self) -> Result<WordGuard<'_, State<T>>, WaitError> {
        if rcu::is_pinned() {
            return Err(WaitError::Pinned);
        }
        let state = self.lock();
        if self.is_in_drop() { Err(WaitError::InDrop) } else { Ok(state) }
    }

    /// Whether this thread may wait for contexts of this table to go.
    fn may_wait(&self) -> Result<(), WaitError> {
        self.lock_to_wait().map(drop)
    }

    /// Whether the context of `id`, which was removed, is dropped.
    fn is_reclaimed(&self, id: Id) -> bool {
        let gone = self.not_live(id.index());
        gone.is_none_or(|gone| !(gone.is_dead() && gone.next() == id.generation() + 1))
    }

    /// Whether the context of `id` waits for its last reference, and for nothing else.
    fn is_referenced(&self, id: Id) -> bool {
        self.not_live(id.index())
            .is_some_and(|gone| gone.is_referenced() && gone.next() == id.generation() + 1)
    }

    /// What the slot of an index says, unless it is live or there is none.
    fn not_live(&self, index: u32) -> Option<NotLive> {
        let _guard = rcu::pin();
        // SAFETY: the guard.
        let slab = unsafe { self.slabs.slab(index) }?;
        // Ordering: Acquire pairs with the Release in `finish`; it carries the drop.
        NotLive::read(slab.slot(index).state.load(Ordering::Acquire))
    }

    /// Blocks until `done`. `blocked`: nothing but a reference is in the way of the next step.
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
                thread::yield_now(); // to who is between a removal and its list
            }
            self.waiters.wait(None, || (done() || !blocked()).then_some(()));
        }
        Ok(())
    }

    /// [`wait_done`](Self::wait_done) that waits for readers in short steps, for a deadline.
    fn wait_timeout(
        &self,
        timeout: Duration,
        mut done: impl FnMut() -> bool,
        blocked: impl Fn() -> bool,
    ) -> Result<(), WaitError> {
        let Some(deadline) = Instant::now().checked_add(timeout) else {
            return self.wait_done(done, blocked);
        };
        // Readers tell nobody that they leave: ask, seldomer and seldomer.
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
                // The last reference tells.
                let unblocked = || (done() || !blocked()).then_some(());
                self.waiters.wait(Some(deadline), unblocked);
            } else {
                let until = (now + step).min(deadline);
                self.waiters.wait(Some(until), || done().then_some(()));
                step = (step * 2).min(Duration::from_millis(1));
            }
        }
    }

    /// One poll of a future that is ready when `done`, of a slot or of the whole table. `blocked`: only
    /// a reference is in the way.
    fn poll_done(
        &self,
        place: &mut Place,
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
        let registered = self.waiters.register(place, slot, context.waker());
        if done() {
            return Poll::Ready(Ok(()));
        }
        let blocked = blocked();
        // Readers tell nobody that they leave: look again soon.
        if !registered || !blocked {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

/// A context that was removed; to wait until it is dropped, or not.
///
/// `removal.await` is a [`RemovalFuture`].
pub struct Removal<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    id: Id,
}

impl<T: Send + Sync + 'static> Removal<'_, T> {
    /// What was removed.
    #[must_use]
    pub fn id(&self) -> Id {
        self.id
    }

    /// Whether the context is dropped: no reader has it any more, and nobody a reference. Moves
    /// reclaim on as [`CtxTable::poll`] does; never blocks.
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
    /// As [`CtxTable::flush`]. A reference of this thread's own is not seen: that waits for ever.
    pub fn wait(&self) -> Result<(), WaitError> {
        let Self { core, id } = self;
        core.wait_done(|| core.is_reclaimed(*id), || core.is_referenced(*id))
    }

    /// Blocks until the context is dropped, or for `timeout`.
    ///
    /// # Errors
    ///
    /// [`WaitError::TimedOut`], and as [`CtxTable::flush`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<(), WaitError> {
        let Self { core, id } = self;
        core.wait_timeout(timeout, || core.is_reclaimed(*id), || core.is_referenced(*id))
    }
}

impl<'a, T: Send + Sync + 'static> IntoFuture for Removal<'a, T> {
    type Output = Result<(), WaitError>;
    type IntoFuture = RemovalFuture<'a, T>;

    fn into_future(self) -> RemovalFuture<'a, T> {
        RemovalFuture { removal: self, place: Place::default() }
    }
}

/// Ready when a removed context is dropped. From [`Removal`].
///
/// Polled again and again while readers are in the way, which tell nobody that they leave; it sleeps
/// while it waits for references.
///
/// # Errors
///
/// As [`Removal::wait`], found when it is polled: a poll never waits, but one with an RCU guard held, or
/// from a drop of a context, may be what it is waited for.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct RemovalFuture<'a, T: Send + Sync + 'static> {
    removal: Removal<'a, T>,
    place: Place,
}

impl<T: Send + Sync + 'static> Future for RemovalFuture<'_, T> {
    type Output = Result<(), WaitError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { removal: Removal { core, id }, place } = self.get_mut();
        let (done, blocked) = (|| core.is_reclaimed(*id), || core.is_referenced(*id));
        core.poll_done(place, Some(id.index()), context, done, blocked)
    }
}

impl<T: Send + Sync + 'static> Drop for RemovalFuture<'_, T> {
    fn drop(&mut self) {
        self.removal.core.waiters.leave(&mut self.place);
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Removal<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Removal").field(&self.id).finish()
    }
}

/// All contexts of a table, removed; to wait until they are dropped, or not. From
/// [`CtxTable::kill_all`].
///
/// Contexts that others remove meanwhile may be waited for as well. `closing.await` is a
/// [`ClosingFuture`].
pub struct Closing<'a, T: Send + Sync + 'static> {
    core: &'a Core<T>,
    killed: usize,
    /// What is below is dropped, or was removed later.
    from: u64,
}

impl<T: Send + Sync + 'static> Closing<'_, T> {
    /// How many contexts were removed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.killed
    }

    /// Whether none was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.killed == 0
    }

    /// Whether all are dropped. Moves reclaim on; never blocks.
    #[must_use]
    pub fn is_done(&mut self) -> bool {
        self.core.advance();
        let from = Cell::new(self.from);
        let clear = self.core.is_clear(&from);
        self.from = from.get();
        clear
    }

    /// Blocks until all are dropped.
    ///
    /// # Errors
    ///
    /// As [`CtxTable::flush`].
    pub fn wait(&mut self) -> Result<(), WaitError> {
        let (core, from) = (self.core, Cell::new(self.from));
        let waited = core.wait_done(|| core.is_clear(&from), || core.is_referenced_at(from.get()));
        self.from = from.get();
        waited
    }

    /// Blocks until all are dropped, or for `timeout`.
    ///
    /// # Errors
    ///
    /// [`WaitError::TimedOut`], and as [`CtxTable::flush`].
    pub fn wait_timeout(&mut self, timeout: Duration) -> Result<(), WaitError> {
        let (core, from) = (self.core, Cell::new(self.from));
        let blocked = || core.is_referenced_at(from.get());
        let waited = core.wait_timeout(timeout, || core.is_clear(&from), blocked);
        self.from = from.get();
        waited
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Moves `from` up to the first context that is not dropped; true if there is none.
    fn is_clear(&self, from: &Cell<u64>) -> bool {
        let _guard = rcu::pin();
        while let Some((key, slab)) = self.slabs.next_slab(from.get() >> SLAB_BITS, LAST_KEY) {
            // SAFETY: invariant 4 of `slab`: found under the guard.
            let it = unsafe { slab.as_ref() };
            let first = u64::from(it.index(0)).max(from.get());
            for index in first..(key + 1) << SLAB_BITS {
                // Ordering: Acquire pairs with the Release in `finish`; it carries the drop.
                let state = it.slot(index as u32).state.load(Ordering::Acquire);
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

impl<'a, T: Send + Sync + 'static> IntoFuture for Closing<'a, T> {
    type Output = Result<usize, WaitError>;
    type IntoFuture = ClosingFuture<'a, T>;

    fn into_future(self) -> ClosingFuture<'a, T> {
        ClosingFuture { closing: self, place: Place::default() }
    }
}

/// Ready, with their number, when all removed contexts are dropped. From [`Closing`]; polled, and
/// refused, as a [`RemovalFuture`] is.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct ClosingFuture<'a, T: Send + Sync + 'static> {
    closing: Closing<'a, T>,
    place: Place,
}

impl<T: Send + Sync + 'static> Future for ClosingFuture<'_, T> {
    type Output = Result<usize, WaitError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { closing: Closing { core, killed, from }, place } = self.get_mut();
        let at = Cell::new(*from);
        let done = || core.is_clear(&at);
        let polled = core.poll_done(place, None, context, done, || core.is_referenced_at(at.get()));
        *from = at.get();
        polled.map_ok(|()| *killed)
    }
}

impl<T: Send + Sync + 'static> Drop for ClosingFuture<'_, T> {
    fn drop(&mut self) {
        self.closing.core.waiters.leave(&mut self.place);
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Closing<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closing").field("killed", &self.killed).finish_non_exhaustive()
    }
}
