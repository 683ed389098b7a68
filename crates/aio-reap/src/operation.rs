//! The future front end: a handle of one request in the engine.

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
use crate::reply::Reply;
use crate::slab::Index;

/// A submitted request. Await it, or block with [`wait`](Self::wait).
///
/// Polling does not turn the engine. The program must call [`Engine::turn`](crate::Engine::turn) or
/// [`wait`](crate::Engine::wait), for example when the engine's descriptor is readable, or run the
/// future in [`Engine::block_on`](crate::Engine::block_on).
///
/// A drop abandons the result, not the I/O: the request still runs, and the engine keeps its buffer
/// until the completion. An opened file is closed then. It is safe to forget an operation: the request completes, but its slot
/// stays taken, and the memory and descriptors of the engine are never freed.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let copied = engine.block_on(async {
///     let (written, buf) = engine.write(&file, b"hello".to_vec(), 0).submit()?.await;
///     written?;
///     let (read, buf) = engine.read(&file, buf, 0).submit()?.await; // the same buffer
///     Ok::<_, std::io::Error>((read?, buf))
/// })?;
/// assert_eq!(copied?, (5, b"hello".to_vec()));
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping an operation abandons its result"]
pub struct Operation<B, T = usize> {
    core: Rc<Core>,
    /// `None` after the result was returned.
    index: Option<Index>,
    buf: PhantomData<B>,
    result: PhantomData<fn() -> T>,
}

impl<B: 'static, T: Reply<B>> Operation<B, T> {
    /// Makes the operation of the slot `index`, which was queued with an `Owned<B, T>` as its payload.
    pub(crate) fn new(core: &Rc<Core>, index: Index) -> Self {
        Self { core: Rc::clone(core), index: Some(index), buf: PhantomData, result: PhantomData }
    }

    /// Returns whether the request has completed.
    pub fn is_done(&self) -> bool {
        self.index.is_none_or(|index| self.core.is_done(index))
    }

    /// Turns the engine, and blocks, until the request completes.
    ///
    /// Callbacks of other requests run here. It may be called inside a callback, even for a request
    /// that completed in the same batch.
    ///
    /// # Panics
    ///
    /// Panics if a poll has already returned the result, or if the kernel refuses to wait (other
    /// code closed a descriptor of the engine).
    pub fn wait(mut self) -> Outcome<B, T> {
        loop {
            if let Some(outcome) = self.take() {
                return outcome;
            }
            self.core.wait(None, None).expect("waiting for the kernel");
        }
    }

    /// Waits like [`wait`](Self::wait), for `timeout` at most.
    ///
    /// # Errors
    ///
    /// Returns the operation if the time is over first.
    ///
    /// # Panics
    ///
    /// Panics like [`wait`](Self::wait).
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Outcome<B, T>, Self> {
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

    /// Tries to cancel the request. Returns false if there was no attempt.
    ///
    /// A request that still waits in the engine, or for a thread of the pool, is always cancelled.
    /// A [close](crate::Engine::close) never is. Nor is a request in io_uring's submission ring
    /// that the kernel has no room for. Of requests that the kernel has begun, io_uring can cancel
    /// reads of pipes and the like, but almost no block I/O, and Linux AIO none. A cancelled
    /// request completes with `ECANCELED` (of a write any part may have been written), any other as
    /// without the attempt. In both cases a later turn delivers the result.
    ///
    /// The call marks every request in flight but a close, also if it returns false. A marked
    /// request is neither retried nor continued: where that would happen, it completes with
    /// `ECANCELED`.
    pub fn cancel(&self) -> bool {
        self.index.is_some_and(|index| self.core.cancel(index))
    }

    /// Returns a future that waits until `at` at most.
    ///
    /// It abandons the wait, not the I/O: if the time comes first, the operation is dropped. The
    /// request keeps its buffer, counts as in flight, and may still write.
    pub fn deadline(self, at: Instant) -> Deadline<B, T> {
        if let Some(index) = self.index {
            self.core.add_deadline(index, at, Action::Wake);
        }
        Deadline { operation: Some(self), at }
    }

    /// Takes the result, if the request has completed.
    fn take(&mut self) -> Option<Outcome<B, T>> {
        let index = self.index.expect("an operation is not polled after it was ready");
        // SAFETY: `new` got a slot whose payload is an `Owned<B, T>`. It is still that slot: only
        // `collect_done` frees it, which succeeds once per operation.
        let (owned, result) = unsafe { self.core.collect_done::<Owned<B, T>>(index) }?;
        self.index = None;
        // Before the wake-ups, which may panic: an opened file has its owner by then.
        let outcome = owned.outcome(result);
        self.core.admit();
        Some(outcome)
    }
}

/// The buffer is in the engine, so the operation has no pinned field.
impl<B, T> Unpin for Operation<B, T> {}

impl<B: 'static, T: Reply<B>> Future for Operation<B, T> {
    type Output = Outcome<B, T>;

    /// # Panics
    ///
    /// Panics when polled again after it was ready.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome<B, T>> {
        loop {
            if let Some(outcome) = self.take() {
                return Poll::Ready(outcome);
            }
            let index = self.index.expect("`take` has checked it");
            if self.core.register_waker(index, cx.waker()) {
                return Poll::Pending;
            }
        }
    }
}

impl<B, T> Drop for Operation<B, T> {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            self.core.orphan(index);
        }
    }
}

/// A future that awaits an [`Operation`] until a time, from [`Operation::deadline`].
///
/// ```
/// use aio_reap::{DeadlinePassed, Engine};
/// use std::time::{Duration, Instant};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(std::fs::File::open("/dev/zero")?)?;
/// let outcome = engine.block_on(async {
///     let read = engine.read(&file, vec![1; 512], 0).submit()?;
///     let mut deadline = read.deadline(Instant::now() + Duration::from_secs(60));
///     match (&mut deadline).await {
///         Ok((read, _buf)) => Ok::<_, std::io::Error>(read?),
///         // The read goes on. Wait for it once more, or drop the operation.
///         Err(DeadlinePassed) => Ok(deadline.into_operation().expect("not ready").await.0?),
///     }
/// })?;
/// assert_eq!(outcome?, 512);
/// # Ok(())
/// # }
/// ```
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Deadline<B, T = usize> {
    /// `None` after it resolved.
    operation: Option<Operation<B, T>>,
    at: Instant,
}

/// The error of a wait whose deadline passed. The request continues.
///
/// ```
/// use aio_reap::{DeadlinePassed, Engine};
/// use std::time::Instant;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// # if engine.backend() != aio_reap::BackendKind::Uring { return Ok(()) }
/// let (pipe, _writer) = std::io::pipe()?;
/// let reader = engine.attach(pipe)?;
/// let late = engine.block_on(async {
///     let read = engine.read(&reader, vec![0; 1], 0).submit()?; // the pipe is empty
///     let late = read.deadline(Instant::now()).await;
///     Ok::<_, std::io::Error>(late.unwrap_err())
/// })?;
/// assert_eq!(late?, DeadlinePassed);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the deadline has passed before the request completed")]
pub struct DeadlinePassed;

impl DeadlinePassed {
    /// Returns `ETIMEDOUT`.
    pub fn errno(&self) -> i32 {
        libc::ETIMEDOUT
    }
}

impl From<DeadlinePassed> for io::Error {
    fn from(error: DeadlinePassed) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

impl<B, T> Deadline<B, T> {
    /// Returns the operation, or `None` if this future has resolved.
    pub fn into_operation(self) -> Option<Operation<B, T>> {
        self.operation
    }
}

impl<B: 'static, T: Reply<B>> Future for Deadline<B, T> {
    type Output = Result<Outcome<B, T>, DeadlinePassed>;

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

impl<B, T> fmt::Debug for Operation<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("collected", &self.index.is_none()).finish()
    }
}
