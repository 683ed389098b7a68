//! The token front end: completions gather in a queue, each with the caller's number.
//!
//! # Invariants
//!
//! 1. `done` is reached by one method at a time: the queue belongs to one thread, and no method
//!    runs anybody else's code while it has the reference (buffers only move).

use std::collections::VecDeque;
use std::rc::Rc;

use percpu::sync::cell::UnsafeCell;

use crate::error::RequestError;
use crate::payload::{DeferredDrop, Deliver, RawResult};

/// A finished request, as [`CompletionQueue::pop`] returns it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion<B> {
    /// What the caller passed to [`Request::enqueue`](crate::Request::enqueue).
    pub token: u64,
    /// Bytes transferred, or the error.
    pub result: Result<usize, RequestError>,
    /// The request's buffer.
    pub buf: B,
}

/// Where completions of many requests gather, in the order they were reaped; a request that the
/// kernel never saw (of no length, or refused by it) comes with the callbacks of the same call.
///
/// Cheap to clone: clones share the queue. It allocates only while it grows past its fullest.
pub struct CompletionQueue<B> {
    done: Rc<UnsafeCell<VecDeque<Done<B>>>>,
}

struct Done<B> {
    token: u64,
    result: RawResult,
    buf: B,
}

impl<B> CompletionQueue<B> {
    /// An empty queue.
    pub fn new() -> Self {
        Self { done: Rc::new(UnsafeCell::new(VecDeque::new())) }
    }

    /// Takes the oldest completion.
    #[inline]
    pub fn pop(&self) -> Option<Completion<B>> {
        // SAFETY: invariant 1; nothing is dropped here.
        let done = self.done.with_mut(|done| unsafe { (*done).pop_front() });
        let Done { token, result, buf } = done?;
        Some(Completion { token, result: result.to_result(), buf })
    }

    /// Completions waiting to be taken.
    pub fn len(&self) -> usize {
        // SAFETY: invariant 1.
        self.done.with(|done| unsafe { (*done).len() })
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
    fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
        let full = self.queue.done.with(|done| {
            // SAFETY: invariant 1.
            let done = unsafe { &*done };
            done.len() == done.capacity()
        });
        // By two ways, so that the usual one is known to call nothing.
        if full { self.push_and_grow(result) } else { self.push(result) }
    }
}

impl<B: 'static> Enqueued<B> {
    /// If nobody else has the queue, it remains.
    #[inline(always)]
    fn push(self, result: RawResult) -> Option<DeferredDrop> {
        let Self { buf, queue, token } = self;
        // SAFETY: invariant 1.
        queue.done.with_mut(|done| unsafe { (*done).push_back(Done { token, result, buf }) });
        if Rc::strong_count(&queue.done) == 1 { Some(queue.done) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn push_and_grow(self, result: RawResult) -> Option<DeferredDrop> {
        self.push(result)
    }
}
