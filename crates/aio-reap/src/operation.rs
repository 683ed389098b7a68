//! The future front end: a handle on one request in the engine.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::Outcome;
use crate::core::Core;
use crate::request::Owned;
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

    /// The result, if it is there.
    fn take(&mut self) -> Option<Outcome<B>> {
        let index = self.index.expect("an operation is not polled after it was ready");
        // SAFETY: `new` was given a slot whose cargo is an `Owned<B>`, and this is that slot:
        // it is released only by `collect_done`, which succeeds once per operation.
        let (owned, result) = unsafe { self.core.collect_done::<Owned<B>>(index) }?;
        self.index = None;
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

impl<B> fmt::Debug for Operation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("collected", &self.index.is_none()).finish()
    }
}
