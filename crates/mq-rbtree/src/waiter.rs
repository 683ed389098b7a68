//! Who waits, and for what: nodes that stand on the waiting thread's stack, or in a future.
//!
//! ```text
//!  WaitList -> waiter <-> waiter <-> waiter      by urgency, then by ticket
//!
//!  thread:  SPINNING ──────────────► COMPLETED, RETRY         nobody has to be woken
//!               └──► PARKED ───────► COMPLETED, RETRY ─► unpark
//!  task:    listed ──► permit ──► polled, or dropped and passed on
//! ```
//!
//! A thread that waits to receive gets its message put into its node; one that waits to send has its
//! message there, for a receiver to take. A task gets a permit: the message, or the room, stays where
//! it is, and it is woken to look. Nothing is ever handed to a task, because a future that is dropped
//! could only put it back behind younger ones.
//!
//! # Invariants
//!
//! 1. All of `inner` is used under the queue's lock only, but for `message` once the state is `COMPLETED` or
//!    `RETRY`: then the waiting thread alone uses it.
//! 2. A listed node lives, and does not move: its thread leaves its stack frame, and its future its
//!    place, only after it was taken off the list under the lock.
//! 3. A node is off the list before its state says so; that store is the last use of the node by who
//!    makes it. Who is to be woken was moved or cloned out of the node before: the thread's own
//!    reference to its parker may end with that store.
//! 4. `parker` is there before the state is `PARKED`, and stays until the thread has left; it is not
//!    looked at in any other state. Who ends the wait of a thread that still spins touches one line of
//!    its node, as far as the message fits, and no other memory of that thread.

use std::cmp::Reverse;
use std::ptr::NonNull;
use std::task::Waker;

use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::{Arc, hint, order, step};

use crate::core::Message;
use crate::deadline::Deadline;
use crate::parker::Parker;

/// The thread spins at its state, and sleeps if that does not change soon.
const SPINNING: u32 = 0;
/// The thread sleeps, or is about to.
const PARKED: u32 = 1;
/// A message was handed over: to the waiting receiver, or by the waiting sender.
const COMPLETED: u32 = 2;
/// Nothing was handed over: look again.
const RETRY: u32 = 3;

/// Who is to be woken, after the unlock.
#[derive(Debug)]
pub(crate) enum Wake {
    Thread(Arc<Parker>),
    Task(Waker),
}

impl Wake {
    pub(crate) fn wake(self) {
        match self {
            Self::Thread(parker) => parker.unpark(),
            Self::Task(waker) => waker.wake(),
        }
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    Completed,
    Retry,
    TimedOut,
}

/// What a waiting sender needs room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<P> {
    pub(crate) priority: P,
    pub(crate) bytes: u32,
    /// Messages that there may be before this one is refused.
    pub(crate) len_limit: usize,
}

/// The place among those who wait: the least is the first.
pub(crate) type Rank = (Reverse<u8>, u64);

/// The place of who comes now, and is not on the list yet.
pub(crate) fn rank_of_new(urgency: u8) -> Rank {
    (Reverse(urgency), u64::MAX)
}

#[repr(C)] // what a hand-over to a thread uses comes first
pub(crate) struct Waiter<T, P> {
    state: AtomicU32,
    inner: UnsafeCell<Inner<T, P>>,
    /// A thread's, once it sleeps.
    parker: UnsafeCell<Option<Arc<Parker>>>,
}

#[repr(C)]
pub(crate) struct Inner<T, P> {
    urgency: u8,
    listed: bool,
    /// A task that was told to look, and has not looked yet.
    pub(crate) permit: bool,
    prev: Link<T, P>,
    next: Link<T, P>,
    /// When it first waited, as a number; 0 before that.
    ticket: u64,
    pub(crate) message: Option<Message<T, P>>,
    pub(crate) demand: Option<Demand<P>>,
    /// A task's, while it is listed.
    waker: Option<Waker>,
}

/// What is on a thread's stack while another one writes there: on lines of its own.
#[repr(align(64))]
pub(crate) struct CacheAligned<W>(pub(crate) W);

/// The state and a small message are on one line.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = {
    let inner = std::mem::offset_of!(Waiter<u64, u32>, inner);
    assert!(inner + std::mem::offset_of!(Inner<u64, u32>, demand) <= 64);
};

type Link<T, P> = Option<NonNull<Waiter<T, P>>>;

// SAFETY: between threads its parts are used one at a time, as invariant 1 says; a message moves.
unsafe impl<T: Send, P: Send> Send for Waiter<T, P> {}
// SAFETY: as above.
unsafe impl<T: Send, P: Send> Sync for Waiter<T, P> {}

impl<T, P: Copy> Waiter<T, P> {
    pub(crate) fn new(urgency: u8) -> Self {
        Self {
            state: AtomicU32::new(SPINNING),
            inner: UnsafeCell::new(Inner {
                urgency,
                listed: false,
                permit: false,
                prev: None,
                next: None,
                ticket: 0,
                message: None,
                demand: None,
                waker: None,
            }),
            parker: UnsafeCell::new(None),
        }
    }

    /// What is used under the lock.
    ///
    /// # Safety
    ///
    /// The caller has the lock of the only queue that knows this node, or nobody else knows it
    /// (invariant 1); the reference ends before another is made.
    #[expect(clippy::mut_from_ref, reason = "the lock makes it unique")]
    pub(crate) unsafe fn inner(&self) -> &mut Inner<T, P> {
        let inner = self.inner.with_mut(|inner| inner);
        // SAFETY: as the caller says.
        unsafe { &mut *inner }
    }

    /// Before a thread waits again.
    pub(crate) fn reset(&self) {
        // Ordering: Relaxed; nobody else knows the node, and the lock publishes it.
        self.state.store(SPINNING, Ordering::Relaxed);
    }

    /// Waits on the thread's behalf: spins `spins` times, then sleeps. `Timeout` does not take it off
    /// the list.
    pub(crate) fn wait(&self, deadline: Option<Deadline>, spins: u32) -> (WaitEnd, bool) {
        for _ in 0..spins {
            if let Some(ended) = self.poll_end() {
                return (ended, true);
            }
            hint::spin_loop();
        }
        (self.sleep(deadline).unwrap_or(WaitEnd::TimedOut), false)
    }

    #[cold]
    fn sleep(&self, deadline: Option<Deadline>) -> Option<WaitEnd> {
        let parker = Parker::current();
        self.parker.with_mut(|own| {
            // SAFETY: invariant 4: the state is not `PARKED` yet, so nobody else spins there.
            unsafe { *own = Some(Arc::clone(&parker)) }
        });
        let release = order!(Release, "park: the parker is set");
        // Ordering: Release on success pairs with the Acquire in `end`; it carries `parker`. Acquire on
        // failure, as in `ended`.
        let parked = self.state.compare_exchange(SPINNING, PARKED, release, Ordering::Acquire);
        if parked.is_ok() {
            parker.park(deadline, || self.poll_end().is_some());
        }
        self.poll_end()
    }

    /// Whether the wait is over.
    pub(crate) fn poll_end(&self) -> Option<WaitEnd> {
        let acquire = order!(Acquire, "poll end: before the message is read");
        // Ordering: Acquire pairs with the Release in `end`; it carries `message`.
        match self.state.load(acquire) {
            COMPLETED => Some(WaitEnd::Completed),
            RETRY => Some(WaitEnd::Retry),
            _ => None,
        }
    }

    /// Ends the wait of a node that was taken off its list, under the lock. The node may be gone when
    /// this returns.
    ///
    /// # Safety
    ///
    /// `node` was on a list of this queue until now, in this section of the lock.
    pub(crate) unsafe fn end_wait(node: NonNull<Self>, ended: WaitEnd) -> Option<Wake> {
        // SAFETY: invariant 2: nobody told it yet that it is off the list.
        let waiter = unsafe { node.as_ref() };
        // SAFETY: the caller has the lock.
        if let Some(waker) = unsafe { waiter.inner() }.waker.take() {
            return Some(Wake::Task(waker)); // it spins at its node under the lock only
        }
        let state = if ended == WaitEnd::Completed { COMPLETED } else { RETRY };
        let release = order!(Release, "end: after the last use of the node");
        let acquire = order!(Acquire, "end: before the parker is used");
        // Ordering: Release on success pairs with the Acquire in `ended`; it carries `message`. Acquire on
        // failure pairs with the Release in `sleep`; it carries `parker`.
        let told = waiter.state.compare_exchange(SPINNING, state, release, acquire);
        if told.is_ok() {
            return None; // the last use of the node was that exchange
        }
        // SAFETY: invariant 4, and the exchange has seen `PARKED`.
        let parker = waiter.parker.with(|parker| unsafe { (*parker).clone() });
        // Ordering: Release, as above. A store would do; loom wants an exchange.
        step!("end: store the result for the parked thread", waiter.state.swap(state, release));
        // The last use of the node was that swap, and the reference is ours.
        parker.map(Wake::Thread)
    }
}

/// Those who wait for the same thing: by urgency, then by ticket.
pub(crate) struct WaitList<T, P> {
    first: Link<T, P>,
    last: Link<T, P>,
    len: usize,
    tickets: u64,
}

// SAFETY: the nodes are; the list uses them under the queue's lock.
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

    /// The one behind `node`.
    ///
    /// # Safety
    ///
    /// `node` is on this list.
    pub(crate) unsafe fn next(&self, node: NonNull<Waiter<T, P>>) -> Link<T, P> {
        // SAFETY: invariant 2.
        let waiter = unsafe { node.as_ref() };
        // SAFETY: the list is used under the lock.
        unsafe { waiter.inner() }.next
    }

    /// Puts a node on the list: behind those of its urgency that came before it. A task is woken by
    /// its waker; a thread has none.
    ///
    /// # Safety
    ///
    /// The node is on no list, and keeps its place until it is off this one (invariant 2).
    pub(crate) unsafe fn add(&mut self, node: NonNull<Waiter<T, P>>, waker: Option<Waker>) {
        // SAFETY: as the caller says.
        let waiter = unsafe { node.as_ref() };
        // SAFETY: the list is used under the lock.
        let inner = unsafe { waiter.inner() };
        debug_assert!(!inner.listed);
        if inner.ticket == 0 {
            self.tickets += 1;
            inner.ticket = self.tickets;
        }
        (inner.listed, inner.waker) = (true, waker);
        let mine = (Reverse(inner.urgency), inner.ticket);
        let mut before = self.last;
        while let Some(at) = before {
            // SAFETY: on this list, invariant 2.
            let other = unsafe { at.as_ref() };
            // SAFETY: the list is used under the lock; another node than ours.
            let other = unsafe { other.inner() };
            if (Reverse(other.urgency), other.ticket) < mine {
                break;
            }
            before = other.prev;
        }
        inner.prev = before;
        inner.next = match before {
            // SAFETY: on this list.
            Some(at) => unsafe { self.next(at) },
            None => self.first,
        };
        let next = inner.next;
        self.link(before, Some(node));
        self.link_back(next, Some(node));
        self.len += 1;
    }

    /// Takes a node off the list; false if it was not on it.
    ///
    /// # Safety
    ///
    /// It lives, and is on no other list.
    pub(crate) unsafe fn remove(&mut self, node: NonNull<Waiter<T, P>>) -> bool {
        // SAFETY: as the caller says.
        let waiter = unsafe { node.as_ref() };
        // SAFETY: the list is used under the lock.
        let inner = unsafe { waiter.inner() };
        if !std::mem::take(&mut inner.listed) {
            return false;
        }
        let (prev, next) = (inner.prev.take(), inner.next.take());
        self.link(prev, next);
        self.link_back(next, prev);
        self.len -= 1;
        true
    }

    fn link(&mut self, prev: Link<T, P>, next: Link<T, P>) {
        match prev {
            Some(prev) => {
                // SAFETY: on this list, invariant 2.
                let prev = unsafe { prev.as_ref() };
                // SAFETY: the list is used under the lock.
                unsafe { prev.inner() }.next = next;
            }
            None => self.first = next,
        }
    }

    fn link_back(&mut self, next: Link<T, P>, prev: Link<T, P>) {
        match next {
            Some(next) => {
                // SAFETY: on this list, invariant 2.
                let next = unsafe { next.as_ref() };
                // SAFETY: the list is used under the lock.
                unsafe { next.inner() }.prev = prev;
            }
            None => self.last = prev,
        }
    }

    /// Checks the order and the links.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold.
    pub(crate) fn validate(&self) {
        let (mut at, mut before, mut count) = (self.first, None, 0);
        let mut last = None;
        while let Some(node) = at {
            // SAFETY: on this list, invariant 2.
            let waiter = unsafe { node.as_ref() };
            // SAFETY: the list is used under the lock.
            let inner = unsafe { waiter.inner() };
            assert!(inner.listed && !inner.permit, "a waiter on the list");
            assert_eq!(inner.prev, before, "the links of waiters");
            let key = (Reverse(inner.urgency), inner.ticket);
            assert!(last.is_none_or(|last| last < key), "the order of waiters");
            last = Some(key);
            (before, at, count) = (at, inner.next, count + 1);
            assert!(count <= self.len, "more waiters than counted");
        }
        assert_eq!((count, before), (self.len, self.last), "the list of waiters");
    }
}

impl<T, P> Inner<T, P> {
    /// Its place, also while it is on no list.
    pub(crate) fn rank(&self) -> Rank {
        let ticket = if self.ticket == 0 { u64::MAX } else { self.ticket };
        (Reverse(self.urgency), ticket)
    }

    pub(crate) fn is_task(&self) -> bool {
        self.waker.is_some()
    }

    /// A task that waits no more, or by another waker; the old one is dropped after the unlock.
    pub(crate) fn take_waker(&mut self) -> Option<Waker> {
        self.waker.take()
    }
}
