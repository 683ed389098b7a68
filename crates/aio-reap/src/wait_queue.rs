//! The futures that wait for a free slot, first come, first served.
//!
//! The first `n` in the queue may have the `n` free slots; nobody else may have one before them. So
//! no slot is handed over: who is polled looks where it stands, and whoever leaves moves the others
//! up.

use std::collections::VecDeque;
use std::task::Waker;

#[derive(Default)]
pub(crate) struct WaitQueue {
    /// By ticket.
    waiters: VecDeque<Waiter>,
    next: u64,
}

struct Waiter {
    ticket: u64,
    /// `None` once woken.
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

    /// How many are before the holder of the ticket, who is in the queue.
    pub(crate) fn position(&self, ticket: u64) -> usize {
        let found = self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket);
        found.expect("who has a ticket is in the queue")
    }

    /// The holder of the ticket waits no more. What is returned is to be dropped where user code may
    /// run.
    pub(crate) fn leave(&mut self, ticket: u64) -> Option<Waker> {
        let position = self.position(ticket);
        self.waiters.remove(position).and_then(|waiter| waiter.waker)
    }

    /// Stores another waker for the holder of the ticket. What is returned is to be dropped where user
    /// code may run.
    pub(crate) fn replace_waker(&mut self, ticket: u64, waker: Waker) -> Option<Waker> {
        let position = self.position(ticket);
        self.waiters[position].waker.replace(waker)
    }

    /// The first that may have one of `free` slots and was not told.
    pub(crate) fn next_to_wake(&mut self, free: usize) -> Option<Waker> {
        self.waiters.iter_mut().take(free).find_map(|waiter| waiter.waker.take())
    }
}
