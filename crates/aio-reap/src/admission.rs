//! Futures that wait for a free slot, first come, first served.
//!
//! The first `n` in the queue may have the `n` free slots; nobody else may have one before them. So
//! no slot is handed over: who is polled looks where it stands, and whoever leaves moves the others
//! up.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use crate::core::Core;
use crate::operation::Operation;
use crate::request::{Request, SubmitError};

#[derive(Default)]
pub(crate) struct Queue {
    /// By ticket.
    waiters: VecDeque<Waiter>,
    next: u64,
}

struct Waiter {
    ticket: u64,
    /// `None` once woken.
    waker: Option<Waker>,
}

impl Queue {
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

    /// The first that may have one of `free` slots and was not told.
    pub(crate) fn next_to_wake(&mut self, free: usize) -> Option<Waker> {
        self.waiters.iter_mut().take(free).find_map(|waiter| waiter.waker.take())
    }
}

/// A request that waits for a free slot: [`Request::submit_async`].
///
/// Resolves to what [`Request::submit`] returns, but never to
/// [`SubmitError::Full`]. Dropping it withdraws the request; nothing was queued.
#[must_use = "futures do nothing unless polled"]
pub struct Submission<'e, B: 'static> {
    /// `None` once resolved.
    request: Option<Request<'e, B>>,
    core: &'e Core,
    ticket: Option<u64>,
}

impl<'e, B: 'static> Submission<'e, B> {
    pub(crate) fn new(request: Request<'e, B>) -> Self {
        let core = request.engine().core();
        Self { request: Some(request), core, ticket: None }
    }

    /// Gives up waiting and returns the request; `None` if it was submitted or refused.
    pub fn into_request(mut self) -> Option<Request<'e, B>> {
        self.request.take()
    }

    /// Whether it is this one's turn.
    fn is_next(&self) -> bool {
        let state = self.core.state.borrow();
        let before = match self.ticket {
            Some(ticket) => state.waiting.position(ticket),
            None => state.waiting.len(),
        };
        before < state.books.slab.free_len() || state.closed
    }

    fn leave(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let mut state = self.core.state.borrow_mut();
        let waker = state.waiting.leave(ticket);
        state.note_waiting();
        drop(state);
        drop(waker); // user code
    }
}

impl<B> Unpin for Submission<'_, B> {}

impl<'e, B: 'static> Future for Submission<'e, B> {
    type Output = Result<Operation<B>, SubmitError<Request<'e, B>>>;

    /// # Panics
    ///
    /// Panics when polled again after it was ready.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let refused = this.request.as_ref().expect("not polled after it was ready").is_refused();
        if refused || this.is_next() {
            this.leave();
            let request = this.request.take().expect("it was there");
            match request.submit_next() {
                Err(SubmitError::Full(request)) => this.request = Some(request),
                done => return Poll::Ready(done),
            }
        }
        let waker = context.waker().clone();
        let mut state = this.core.state.borrow_mut();
        let old = match this.ticket {
            None => {
                this.ticket = Some(state.waiting.join(waker));
                state.note_waiting();
                None
            }
            Some(ticket) => {
                let position = state.waiting.position(ticket);
                state.waiting.waiters[position].waker.replace(waker)
            }
        };
        drop(state);
        drop(old);
        Poll::Pending
    }
}

impl<B> Drop for Submission<'_, B> {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            self.leave();
            self.core.admit(); // those behind moved up
        }
    }
}

impl<B> fmt::Debug for Submission<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submission").field("waiting", &self.ticket.is_some()).finish()
    }
}
