//! The future front end: a handle on one request in the engine.

use std::fmt;
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::core::Core;
use crate::deadlines::Action;
use crate::outcome::{Outcome, Owned};
use crate::slab::Index;

/// A submitted request; await it, or block with [`wait`](Self::wait).
///
/// Polling does not turn the engine: something must call [`Engine::turn`](crate::Engine::turn) or
/// [`wait`](crate::Engine::wait), for instance when the engine's descriptor is readable, or
/// [`Engine::block_on`](crate::Engine::block_on) does.
///
/// Dropping it abandons the result, not the I/O: the request still runs, its buffer stays with the
/// engine until then. Forgetting it is safe: the request completes, but its slot stays taken, and
/// the memory and descriptors of the engine are kept for ever.
#[must_use = "dropping an operation abandons its result"]
pub struct Operation<B> {
    core: Rc<Core>,
    /// `None` once the result was handed out.
    index: Option<Index>,
    buf: PhantomData<B>,
}

impl<B: 'static> Operation<B> {
    /// `index` was queued with an `Owned<B>` as its cargo.
    pub(crate) fn new(core: &Rc<Core>, index: Index) -> Self {
        Self { core: Rc::clone(core), index: Some(index), buf: PhantomData }
    }

    /// Whether the result is there.
    pub fn is_done(&self) -> bool {
        self.index.is_none_or(|index| self.core.is_done(index))
    }

    /// Turns the engine until the request completes; blocks meanwhile.
    ///
    /// Callbacks of other requests run here. It may be called inside a callback, also for a
    /// sibling that completed in the same batch.
    ///
    /// # Panics
    ///
    /// Panics if the result was already taken by polling, or if the kernel refuses to wait
    /// (a descriptor of the engine was closed behind its back).
    pub fn wait(mut self) -> Outcome<B> {
        loop {
            if let Some(outcome) = self.take() {
                return outcome;
            }
            self.core.wait(None, None).expect("waiting for the kernel");
        }
    }

    /// As [`wait`](Self::wait), for `timeout` at most.
    ///
    /// # Errors
    ///
    /// The operation, when the time is over first.
    ///
    /// # Panics
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Outcome<B>, Self> {
        let Some(end) = self.core.instant().checked_add(timeout) else { return Ok(self.wait()) };
        loop {
            if let Some(outcome) = self.take() {
                return Ok(outcome);
            }
            let left = end.saturating_duration_since(self.core.instant());
            if left.is_zero() {
                return Err(self);
            }
            self.core.wait(Some(left), None).expect("waiting for the kernel");
        }
    }

    /// Tries to end the request early; returns whether there was anything to try.
    ///
    /// A request that is still waiting in the engine, or for a thread of the pool, ends for certain;
    /// of what the kernel has begun, io_uring can end reads of pipes and the like, but hardly any
    /// block I/O, and Linux AIO none. A request that was ended completes with `ECANCELED` (after a
    /// write any part may have been written), any other as if nothing had been tried. Either way
    /// the result is delivered by a later turn.
    pub fn cancel(&self) -> bool {
        self.index.is_some_and(|index| self.core.cancel(index))
    }

    /// A future that waits no longer than until `at`.
    ///
    /// It abandons the wait, not the I/O: when the time comes first, the operation is dropped, and
    /// the request goes on with its buffer, counts as in flight, and may still write.
    pub fn deadline(self, at: Instant) -> Deadline<B> {
        if let Some(index) = self.index {
            self.core.add_deadline(index, at, Action::Wake);
        }
        Deadline { operation: Some(self), at }
    }

    /// The result, if it is there.
    fn take(&mut self) -> Option<Outcome<B>> {
        let index = self.index.expect("an operation is not polled after it was ready");
        // SAFETY: `new` was given a slot whose cargo is an `Owned<B>`, and this is that slot:
        // it is released only by `collect_done`, which succeeds once per operation.
        let (owned, result) = unsafe { self.core.collect_done::<Owned<B>>(index) }?;
        self.index = None;
        self.core.admit();
        Some(owned.outcome(result))
    }
}

/// It never pins anything: the buffer is in the engine.
impl<B> Unpin for Operation<B> {}

impl<B: 'static> Future for Operation<B> {
    type Output = Outcome<B>;

    /// # Panics
    ///
    /// Panics when polled again after it was ready.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome<B>> {
        loop {
            if let Some(outcome) = self.take() {
                return Poll::Ready(outcome);
            }
            let index = self.index.expect("`take` found it");
            if self.core.register_waker(index, cx.waker()) {
                return Poll::Pending;
            }
        }
    }
}

impl<B> Drop for Operation<B> {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            self.core.orphan(index);
        }
    }
}

/// An [`Operation`] awaited until a time: [`Operation::deadline`].
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Deadline<B> {
    /// `None` once resolved.
    operation: Option<Operation<B>>,
    at: Instant,
}

/// The deadline of a wait has passed; the request goes on without anybody waiting for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the deadline has passed before the request completed")]
pub struct DeadlinePassed;

impl DeadlinePassed {
    /// `ETIMEDOUT`.
    pub fn errno(&self) -> i32 {
        libc::ETIMEDOUT
    }
}

impl From<DeadlinePassed> for io::Error {
    fn from(error: DeadlinePassed) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

impl<B> Deadline<B> {
    /// The operation, to wait for it otherwise; `None` if this future is resolved.
    pub fn into_operation(self) -> Option<Operation<B>> {
        self.operation
    }
}

impl<B: 'static> Future for Deadline<B> {
    type Output = Result<Outcome<B>, DeadlinePassed>;

    /// # Panics
    ///
    /// Panics when polled again after it was ready.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let at = self.at;
        let operation = self.operation.as_mut().expect("not polled after it was ready");
        if let Poll::Ready(outcome) = Pin::new(&mut *operation).poll(cx) {
            self.operation = None;
            return Poll::Ready(Ok(outcome));
        }
        if operation.core.instant() < at {
            return Poll::Pending;
        }
        self.operation = None;
        Poll::Ready(Err(DeadlinePassed))
    }
}

impl<B> fmt::Debug for Operation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("collected", &self.index.is_none()).finish()
    }
}
