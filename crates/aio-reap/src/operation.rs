//! The future front end: a handle of one request in the engine.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::core::Core;
use crate::payload::{Outcome, Reply};
use crate::slab::{Index, SlotState};

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
    /// Makes the operation of the slot `index`, which was queued with these types and no receiver.
    pub(crate) fn new(core: &Rc<Core>, index: Index) -> Self {
        Self { core: Rc::clone(core), index: Some(index), buf: PhantomData, result: PhantomData }
    }

    /// Returns whether the request has completed: for a program that turns the engine, or
    /// [waits](crate::Engine::wait) for a time at most.
    pub fn is_done(&self) -> bool {
        self.index.is_none_or(|index| {
            self.core.state.borrow().completions.slab.peek(index).state == SlotState::Done
        })
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

    /// Takes the result, if the request has completed.
    fn take(&mut self) -> Option<Outcome<B, T>> {
        let index = self.index.expect("an operation is not polled after it was ready");
        // SAFETY: `new` got a slot that was queued with these types. It is still that slot: only
        // `collect_done` frees it, which succeeds once per operation.
        let outcome = unsafe { self.core.collect_done::<B, T>(index) }?;
        self.index = None;
        self.core.admit(); // may panic; an opened file has its owner by now
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

impl<B, T> fmt::Debug for Operation<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("collected", &self.index.is_none()).finish()
    }
}
