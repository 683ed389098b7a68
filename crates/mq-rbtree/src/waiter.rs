//! Waiting threads and tasks: list nodes on the stack of the waiting thread, or in a future.
//!
//! ```text
//!  WaitList -> waiter <-> waiter <-> waiter      by ticket
//!
//!  thread:  SPINNING ──────────────► COMPLETED, RETRY        no wake-up is needed
//!               └──► PARKED ───────► COMPLETED, RETRY ─► unpark
//!  task:    listed ──► permit ──► polled, or dropped and the permit passed on
//! ```
//!
//! A thread that waits to receive gets its message stored into its node. A thread that waits to
//! send has its message in its node, from which another thread moves it. A task gets a permit: the
//! message or the room stays in the queue, and the task is woken to poll again. A message is never
//! stored into the node of a task, because a dropped future could only put it back behind younger
//! messages.
//!
//! # Invariants
//!
//! 1. `inner` is used only under the queue's lock. The exception is `message` once the state is
//!    `COMPLETED` or `RETRY`: then only the waiting thread uses it.
//! 2. A listed node is alive and does not move. A thread leaves its frame only after it has read
//!    `COMPLETED` or `RETRY`, or has found its node off the list under the lock. A future leaves its place
//!    only after it has found its node off the list under the lock.
//! 3. A node is taken off its list before the state is set to `COMPLETED` or `RETRY`. That store is
//!    the last access to the node by the thread that makes it. The parker or waker was cloned or
//!    moved out of the node before, because the waiting thread may be gone after the store.
//! 4. `parker` is set before the state becomes `PARKED`, and stays until the thread has left. It is
//!    not read in any other state. So ending the wait of a spinning thread touches no memory of that
//!    thread but its node.
//! 5. While a node is listed, its owner has only shared references to it. A `&mut` to the future around it
//!    claims nothing, because the node is not `Unpin`.

use std::marker::PhantomPinned;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;

use offlock_sync::atomic::{AtomicU32, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{order, step};

use crate::core::Message;
use crate::parker::Parker;
use crate::parker::Wait;

/// The thread polls its state, and will park if that does not change soon.
const SPINNING: u32 = 0;
/// The thread sleeps, or is about to.
const PARKED: u32 = 1;
/// A message was transferred: to the waiting receiver, or from the waiting sender.
const COMPLETED: u32 = 2;
/// Nothing was transferred: the thread tries again.
const RETRY: u32 = 3;

/// A thread or task to wake after the unlock.
#[derive(Debug)]
pub(crate) enum Wakeup {
    Thread(Arc<Parker>),
    Task(Waker),
}

impl Wakeup {
    pub(crate) fn wake(self) {
        match self {
            Self::Thread(parker) => parker.unpark(),
            Self::Task(waker) => waker.wake(),
        }
    }
}

/// The way in which a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    Completed,
    Retry,
    TimedOut,
}

/// The room that a waiting sender needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<P> {
    pub(crate) priority: P,
    /// The queue's length must be below this: the most messages, less the reserves for others.
    pub(crate) len_limit: usize,
}

/// The ticket of a waiter that was never listed.
const NO_TICKET: u64 = u64::MAX;

#[repr(C)] // the fields that a hand-over to a thread uses come first
pub(crate) struct Waiter<T, P> {
    state: AtomicU32,
    inner: UnsafeCell<Inner<T, P>>,
    /// The parker of a thread that sleeps.
    parker: UnsafeCell<Option<Arc<Parker>>>,
    /// Invariant 5.
    _pinned: PhantomPinned,
}

#[repr(C)]
pub(crate) struct Inner<T, P> {
    listed: bool,
    /// A task that was woken to poll, and has not polled yet.
    pub(crate) permit: bool,
    prev: Link<T, P>,
    next: Link<T, P>,
    /// The order of arrival; [`NO_TICKET`] before the node is first listed.
    ticket: u64,
    pub(crate) message: Option<Message<T, P>>,
    pub(crate) demand: Option<Demand<P>>,
    /// The waker of a listed task; a thread has none.
    waker: Option<Waker>,
}

/// A value on cache lines of its own: another thread writes to it while it is on the stack.
#[repr(align(64))]
pub(crate) struct CacheAligned<W>(pub(crate) W);

/// The state and a small message share a cache line.
#[cfg(not(offlock_model))]
const _: () = {
    let inner = std::mem::offset_of!(Waiter<u64, u32>, inner);
    assert!(inner + std::mem::offset_of!(Inner<u64, u32>, demand) <= 64);
};

type Link<T, P> = Option<NonNull<Waiter<T, P>>>;

// SAFETY: by invariant 1 each field is used by one thread at a time, which is a move as far as `T`
// and `P` can tell, so `T: Send` and `P: Send` suffice.
unsafe impl<T: Send, P: Send> Send for Waiter<T, P> {}
// SAFETY: by invariant 1 a shared node gives access to each field to one thread at a time, so `T:
// Send` and `P: Send` suffice; `&T` is never shared.
unsafe impl<T: Send, P: Send> Sync for Waiter<T, P> {}

impl<T, P: Copy> Waiter<T, P> {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU32::new(SPINNING),
            inner: UnsafeCell::new(Inner {
                listed: false,
                permit: false,
                prev: None,
                next: None,
                ticket: NO_TICKET,
                message: None,
                demand: None,
                waker: None,
            }),
            parker: UnsafeCell::new(None),
            _pinned: PhantomPinned,
        }
    }

    /// Returns the part of the node that the lock protects.
    ///
    /// # Safety
    ///
    /// The node is alive. By invariant 1 the caller may use it: it holds the lock of the only queue
    /// that knows the node, or no other thread knows the node. The reference ends before another one
    /// is made.
    pub(crate) unsafe fn inner_of<'a>(node: NonNull<Self>) -> &'a mut Inner<T, P> {
        // SAFETY: the caller guarantees that the node is alive.
        let inner = unsafe { node.as_ref() }.inner.with_mut(|inner| inner);
        // SAFETY: the caller guarantees exclusive access while the reference lives.
        unsafe { &mut *inner }
    }

    /// Prepares the node for the next wait of its thread.
    pub(crate) fn reset(&self) {
        // Ordering: Relaxed; no other thread knows the node, and the lock publishes it.
        self.state.store(SPINNING, Ordering::Relaxed);
    }

    /// Makes the calling thread sleep until its wait ends. Returns how the wait ended: `TimedOut` leaves
    /// the node on its list.
    #[cold]
    pub(crate) fn sleep(&self, wait: Wait) -> WaitEnd {
        let has_ended = || self.poll_end().is_some();
        let parker = Parker::current();
        self.parker.with_mut(|field| {
            // SAFETY: by invariant 4 no other thread reads `parker`, because the state is not
            // `PARKED` yet.
            unsafe { *field = Some(parker.clone()) }
        });
        let release = order!(Release, "park: the parker is set");
        // Ordering: Release on success pairs with the Acquire in `end_wait`; it carries `parker`.
        // Relaxed on failure; `poll_end` loads the end again.
        let parked = self.state.compare_exchange(SPINNING, PARKED, release, Ordering::Relaxed);
        if parked.is_ok() {
            parker.park(wait, has_ended);
        }
        self.poll_end().unwrap_or(WaitEnd::TimedOut)
    }

    /// Returns how the wait ended, or `None` while it lasts.
    pub(crate) fn poll_end(&self) -> Option<WaitEnd> {
        let acquire = order!(Acquire, "poll end: before the message is read");
        // Ordering: Acquire pairs with the Release in `end_wait`; it carries `message`.
        match self.state.load(acquire) {
            COMPLETED => Some(WaitEnd::Completed),
            RETRY => Some(WaitEnd::Retry),
            _ => None,
        }
    }

    /// Ends the wait of a node that was taken off its list under the lock. The node may be gone
    /// when this returns. Returns the thread or task to wake, if any.
    ///
    /// # Safety
    ///
    /// The caller holds the queue's lock and has taken `node` off a list in this section.
    pub(crate) unsafe fn end_wait(node: NonNull<Self>, ended: WaitEnd) -> Option<Wakeup> {
        // SAFETY: by invariant 2 the node is alive: its thread has not read the end of its wait, which is
        // stored below, and without that end the thread or future leaves only under the lock.
        let waiter = unsafe { node.as_ref() };
        // SAFETY: the caller holds the lock, and this is the only reference.
        if let Some(waker) = unsafe { Self::inner_of(node) }.waker.take() {
            return Some(Wakeup::Task(waker)); // a task uses its node only under the lock
        }
        let state = if ended == WaitEnd::Completed { COMPLETED } else { RETRY };
        let release = order!(Release, "end: after the last use of the node");
        let acquire = order!(Acquire, "end: before the parker is used");
        // Ordering: Release on success pairs with the Acquire in `poll_end`; it carries `message`.
        // Acquire on failure pairs with the Release in `sleep`; it carries `parker`.
        let exchanged = waiter.state.compare_exchange(SPINNING, state, release, acquire);
        if exchanged.is_ok() {
            return None; // the exchange was the last access to the node
        }
        // SAFETY: the failed exchange has read `PARKED`, so by invariant 4 `parker` is set and not
        // written.
        let parker = waiter.parker.with(|parker| unsafe { (*parker).clone() });
        // Ordering: Release pairs with the Acquire in `poll_end`; it carries `message`. A store
        // would suffice; loom needs an exchange.
        step!("end: store the result for the parked thread", waiter.state.swap(state, release));
        // The swap was the last access to the node; `parker` is a clone.
        parker.map(Wakeup::Thread)
    }
}

/// The waiters for room, or for messages, by ticket.
pub(crate) struct WaitList<T, P> {
    first: Link<T, P>,
    last: Link<T, P>,
    len: usize,
    tickets: u64,
}

// SAFETY: the list uses its nodes only under the queue's lock, and nodes are `Send`.
unsafe impl<T: Send, P: Send> Send for WaitList<T, P> {}

impl<T, P: Copy> WaitList<T, P> {
    pub(crate) const fn new() -> Self {
        Self { first: None, last: None, len: 0, tickets: 0 }
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn first(&self) -> Link<T, P> {
        self.first
    }

    /// Returns the nodes in their order, each with the part that the lock protects.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NonNull<Waiter<T, P>>, &Inner<T, P>)> {
        let mut next = self.first;
        std::iter::from_fn(move || {
            let node = next?;
            // SAFETY: the node is on this list, so by invariant 2 it is alive. The list is in the
            // queue's state, which is reached only under the lock, and is borrowed meanwhile: no other
            // reference is made.
            let inner: &Inner<T, P> = unsafe { Waiter::inner_of(node) };
            next = inner.next;
            Some((node, inner))
        })
    }

    /// Puts a node on the list, behind the earlier ones: a task that waits again has its old place. A task has a waker, a
    /// thread has none.
    ///
    /// # Safety
    ///
    /// The caller holds the lock. The node is on no list, and stays in its place until it is off
    /// this one (invariant 2).
    pub(crate) unsafe fn add(&mut self, node: NonNull<Waiter<T, P>>, waker: Option<Waker>) {
        // SAFETY: the caller guarantees that the node is alive, and holds the lock. The references
        // below are to listed nodes, and so to others.
        let inner = unsafe { Waiter::inner_of(node) };
        debug_assert!(!inner.listed);
        if inner.ticket == NO_TICKET {
            inner.ticket = self.tickets;
            self.tickets += 1;
        }
        (inner.listed, inner.waker) = (true, waker);
        (inner.prev, inner.next) = (self.last, None);
        while let Some(before) = inner.prev {
            // SAFETY: `before` is on this list, so by invariant 2 it is alive. The caller holds the lock.
            let other = unsafe { Waiter::inner_of(before) };
            if other.ticket < inner.ticket {
                break;
            }
            (inner.prev, inner.next) = (other.prev, Some(before));
        }
        let (prev, next) = (inner.prev, inner.next);
        *self.link_of(prev, |inner| &mut inner.next, |list| &mut list.first) = Some(node);
        *self.link_of(next, |inner| &mut inner.prev, |list| &mut list.last) = Some(node);
        self.len += 1;
    }

    /// Takes a node off the list. Returns false if it was not on it.
    ///
    /// # Safety
    ///
    /// The caller holds the lock. The node is alive and on no other list.
    pub(crate) unsafe fn remove(&mut self, node: NonNull<Waiter<T, P>>) -> bool {
        // SAFETY: the caller guarantees that the node is alive, and holds the lock. The references
        // below are to other nodes.
        let inner = unsafe { Waiter::inner_of(node) };
        if !std::mem::take(&mut inner.listed) {
            return false;
        }
        let (prev, next) = (inner.prev.take(), inner.next.take());
        *self.link_of(prev, |inner| &mut inner.next, |list| &mut list.first) = next;
        *self.link_of(next, |inner| &mut inner.prev, |list| &mut list.last) = prev;
        self.len -= 1;
        true
    }

    /// Returns a link of a node of this list, or that end of the list if there is no node.
    fn link_of(
        &mut self,
        node: Link<T, P>,
        link: fn(&mut Inner<T, P>) -> &mut Link<T, P>,
        end: fn(&mut Self) -> &mut Link<T, P>,
    ) -> &mut Link<T, P> {
        match node {
            // SAFETY: the node is on this list, so by invariant 2 it is alive. `add` and `remove` hold
            // the lock, and write through the link at once.
            Some(node) => link(unsafe { Waiter::inner_of(node) }),
            None => end(self),
        }
    }

    /// Checks the order and the links.
    ///
    /// # Panics
    ///
    /// Panics with the property that is violated.
    pub(crate) fn validate(&self) {
        let (mut last, mut prev, mut count) = (None, None, 0);
        for (node, inner) in self.iter() {
            assert!(inner.listed && !inner.permit, "a waiter on the list");
            assert_eq!(inner.prev, prev, "the links of waiters");
            assert!(last.is_none_or(|last| last < inner.ticket), "the order of waiters");
            (last, prev, count) = (Some(inner.ticket), Some(node), count + 1);
            assert!(count <= self.len, "more waiters than counted");
        }
        assert_eq!((count, prev), (self.len, self.last), "the list of waiters");
    }
}

impl<T, P> Inner<T, P> {
    pub(crate) fn is_task(&self) -> bool {
        self.waker.is_some()
    }

    /// Takes the waker of a task that stops waiting or has another waker now. The caller drops it
    /// after the unlock.
    pub(crate) fn take_waker(&mut self) -> Option<Waker> {
        self.waker.take()
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use std::marker::PhantomData;

    use super::Waiter;

    /// Returns in `IS` whether a type is `Unpin`, in a way that compiles for both answers.
    trait Ask {
        const IS: bool = false;
    }

    struct Of<T>(PhantomData<T>);

    impl<T> Ask for Of<T> {}

    impl<T: Unpin> Of<T> {
        const IS: bool = true;
    }

    /// A `&mut` to a type that is `Unpin` promises the compiler exclusive access. A future that is polled
    /// or dropped has a `&mut` to itself, while holders of the lock write the listed node in it.
    #[test]
    fn inv08_an_exclusive_reference_to_a_node_promises_nothing() {
        const { assert!(Of::<u64>::IS) }
        let node_is_unpin = Of::<Waiter<u64, u32>>::IS;
        assert!(!node_is_unpin);
    }
}
