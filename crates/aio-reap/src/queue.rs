//! The token front end: completions gather in a queue, each with the caller's number.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use crate::cargo::{Deliver, Verdict};

/// A finished request, as [`CompletionQueue::pop`] returns it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion<B> {
    /// What the caller passed to [`Request::enqueue`](crate::Request::enqueue).
    pub token: u64,
    /// Bytes transferred, or the error.
    pub result: io::Result<usize>,
    /// The request's buffer.
    pub buf: B,
}

/// Where completions of many requests gather, in the order they were reaped; a request that the
/// kernel never saw (of no length, or refused by it) comes with the callbacks of the same call.
///
/// Cheap to clone: clones share the queue. It allocates only while it grows past its fullest.
pub struct CompletionQueue<B> {
    done: Rc<RefCell<VecDeque<Done<B>>>>,
}

struct Done<B> {
    token: u64,
    verdict: Verdict,
    buf: B,
}

impl<B> CompletionQueue<B> {
    /// An empty queue.
    pub fn new() -> Self {
        Self { done: Rc::default() }
    }

    /// Takes the oldest completion.
    pub fn pop(&self) -> Option<Completion<B>> {
        let Done { token, verdict, buf } = self.done.borrow_mut().pop_front()?;
        Some(Completion { token, result: verdict.result(), buf })
    }

    /// Completions waiting to be taken.
    pub fn len(&self) -> usize {
        self.done.borrow().len()
    }

    /// Whether nothing waits to be taken.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<B> Default for CompletionQueue<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B> Clone for CompletionQueue<B> {
    fn clone(&self) -> Self {
        Self { done: Rc::clone(&self.done) }
    }
}

impl<B> std::fmt::Debug for CompletionQueue<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionQueue").field("len", &self.len()).finish()
    }
}

/// A request on its way to a queue.
pub(crate) struct Enqueued<B> {
    pub(crate) buf: B,
    pub(crate) queue: CompletionQueue<B>,
    pub(crate) token: u64,
}

impl<B: 'static> Deliver for Enqueued<B> {
    fn deliver(self, verdict: Verdict) {
        let Self { buf, queue, token } = self;
        queue.done.borrow_mut().push_back(Done { token, verdict, buf });
    }
}
