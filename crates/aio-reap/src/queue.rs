//! The queue front end: completions are collected in a queue, each with a token of the caller.
//!
//! # Invariants
//!
//! 1. One method at a time accesses `done`: the queue belongs to one thread, and no method runs
//!    code of the user while it has the reference (buffers only move).

use std::collections::VecDeque;
use std::rc::Rc;

use offlock_sync::cell::UnsafeCell;

use crate::error::RequestError;
use crate::payload::{DeferredDrop, Delivery, RawResult, Receive, Reply};

/// A completed request, as [`CompletionQueue::pop`] returns it.
///
/// ```
/// use aio_reap::{Completion, CompletionQueue, Engine};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let queue = CompletionQueue::new();
/// engine.write(&file, b"hello".to_vec(), 0).enqueue(&queue, 42)?;
/// engine.drain()?;
/// let Some(Completion { token, result, buf, .. }) = queue.pop() else { panic!("drained") };
/// assert_eq!((token, result?, &buf[..]), (42, 5, &b"hello"[..]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion<B, T = usize> {
    /// The token that was passed to [`Request::enqueue`](crate::Request::enqueue).
    pub token: u64,
    /// The result (by default the number of bytes transferred), or the error.
    pub result: Result<T, RequestError>,
    /// The request's buffer.
    pub buf: B,
}

/// A queue of completed requests, in the order in which they were reaped. A request that completes
/// without the kernel (with an empty buffer, or refused by it) is added when the same call runs
/// callbacks.
///
/// Clones are cheap and share the queue. It allocates only when it grows beyond its largest length
/// so far.
///
/// ```
/// use aio_reap::{CompletionQueue, Engine};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(std::fs::File::open("/dev/zero")?)?;
/// let queue = CompletionQueue::new();
/// for block in 0..8 {
///     engine.read(&file, vec![1; 4096], block * 4096).enqueue(&queue, block)?;
/// }
/// let mut read = 0;
/// while read < 8 {
///     while let Some(completion) = queue.pop() {
///         assert_eq!(completion.result?, 4096);
///         read += 1; // here a program submits the next read, with this buffer
///     }
///     engine.wait(None)?; // returns at once if nothing is in flight
/// }
/// # Ok(())
/// # }
/// ```
pub struct CompletionQueue<B, T = usize> {
    done: Rc<UnsafeCell<VecDeque<Completion<B, T>>>>,
}

impl<B, T> CompletionQueue<B, T> {
    /// Makes an empty queue.
    pub fn new() -> Self {
        Self { done: Rc::new(UnsafeCell::new(VecDeque::new())) }
    }

    /// Removes and returns the oldest completion.
    #[inline]
    pub fn pop(&self) -> Option<Completion<B, T>> {
        // SAFETY: by invariant 1 no other reference exists, and this one runs no code of the user:
        // nothing is dropped.
        self.done.with_mut(|done| unsafe { (*done).pop_front() })
    }

    /// Returns the number of completions in the queue.
    pub fn len(&self) -> usize {
        // SAFETY: by invariant 1 no other reference exists while this one does.
        self.done.with(|done| unsafe { (*done).len() })
    }

    /// Returns whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<B, T> Default for CompletionQueue<B, T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B, T> Clone for CompletionQueue<B, T> {
    fn clone(&self) -> Self {
        Self { done: Rc::clone(&self.done) }
    }
}

impl<B, T> std::fmt::Debug for CompletionQueue<B, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionQueue").field("len", &self.len()).finish()
    }
}

/// The receiver of an outcome that goes to a queue.
pub(crate) struct Enqueued<B, T> {
    pub(crate) queue: CompletionQueue<B, T>,
    pub(crate) token: u64,
}

impl<B: 'static, T: Reply<B>> Receive<B, T> for Enqueued<B, T> {
    fn receive(
        delivery: Delivery<B, Self, T>,
        result: RawResult,
        deferred: &mut Vec<DeferredDrop>,
    ) {
        let full = delivery.receiver.queue.done.with(|done| {
            // SAFETY: by invariant 1 no other reference exists while this one does.
            let done = unsafe { &*done };
            done.len() == done.capacity()
        });
        // Two paths, so that the compiler sees that the usual one calls no allocator.
        if full {
            Self::push_and_grow(delivery, result, deferred);
        } else {
            Self::push(delivery, result, deferred);
        }
    }
}

impl<B: 'static, T: 'static> CompletionQueue<B, T> {
    #[cold]
    #[inline(never)]
    fn defer_drop(self, deferred: &mut Vec<DeferredDrop>) {
        deferred.push(self.done);
    }
}

impl<B: 'static, T: Reply<B>> Enqueued<B, T> {
    /// Pushes the completion. Defers the drop of the queue if this was its last owner.
    #[inline(always)]
    fn push(delivery: Delivery<B, Self, T>, result: RawResult, deferred: &mut Vec<DeferredDrop>) {
        let (Self { queue, token }, (result, buf)) = delivery.into_parts(result);
        let completion = Completion { token, result, buf };
        // SAFETY: by invariant 1 no other reference exists while this one does.
        queue.done.with_mut(|done| unsafe { (*done).push_back(completion) });
        if Rc::strong_count(&queue.done) == 1 {
            queue.defer_drop(deferred);
        }
    }

    #[cold]
    #[inline(never)]
    fn push_and_grow(
        delivery: Delivery<B, Self, T>,
        result: RawResult,
        deferred: &mut Vec<DeferredDrop>,
    ) {
        Self::push(delivery, result, deferred);
    }
}
