//! The futures that wait for a free slot, first come, first served.
//!
//! The first `n` futures in the queue may take the `n` free slots, before any other request. So no
//! slot is handed over: a polled future checks its position, and a future that leaves moves those
//! behind it forward.

use std::collections::VecDeque;
use std::task::Waker;

/// A queue of futures that wait for a slot.
#[derive(Default)]
pub(crate) struct WaitQueue {
    /// Sorted by ticket.
    waiters: VecDeque<Waiter>,
    next: u64,
}

/// A waiting future.
struct Waiter {
    ticket: u64,
    /// `None` after it was woken.
    waker: Option<Waker>,
}

impl WaitQueue {
    pub(crate) fn len(&self) -> usize {
        self.waiters.len()
    }

    pub(crate) fn join(&mut self, waker: Waker) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.waiters.push_back(Waiter { ticket, waker: Some(waker) });
        ticket
    }

    /// Returns how many futures are before the future with this ticket, which must be in the queue.
    pub(crate) fn position(&self, ticket: u64) -> usize {
        let found = self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket);
        found.expect("a future with a ticket is in the queue")
    }

    /// Removes the future with this ticket. The caller drops the returned waker where user code may
    /// run.
    pub(crate) fn leave(&mut self, ticket: u64) -> Option<Waker> {
        let position = self.position(ticket);
        self.waiters.remove(position).and_then(|waiter| waiter.waker)
    }

    /// Replaces the waker of the future with this ticket. The caller drops the old one where user
    /// code may run.
    pub(crate) fn replace_waker(&mut self, ticket: u64, waker: Waker) -> Option<Waker> {
        let position = self.position(ticket);
        self.waiters[position].waker.replace(waker)
    }

    /// Returns whether a future that may take one of the `free` slots was not woken.
    pub(crate) fn is_due(&self, free: usize) -> bool {
        self.waiters.iter().take(free).any(|waiter| waiter.waker.is_some())
    }

    /// Takes the waker of the first future that may take one of the `free` slots and was not woken.
    pub(crate) fn next_to_wake(&mut self, free: usize) -> Option<Waker> {
        self.waiters.iter_mut().take(free).find_map(|waiter| waiter.waker.take())
    }
}
