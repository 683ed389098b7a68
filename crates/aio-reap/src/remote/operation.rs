//! What another thread waits with.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use percpu::sync::Arc;

use super::mailbox::{Answer, SlotIndex};
use super::sent::SentRequest;
use super::shared::Shared;
use crate::outcome::{Outcome, Owned};
use crate::payload::RawResult;

/// A request that was sent to another thread's engine; await it on any executor, or block with
/// [`wait`](Self::wait).
///
/// Dropping it abandons the result, not the I/O: the request still runs, and its buffer is freed on
/// the engine's thread when it is done. Forgetting it is safe, but its place stays taken.
#[must_use = "dropping an operation abandons its result"]
pub struct RemoteOperation<B> {
    shared: Arc<Shared>,
    /// `None` once the result was handed out.
    index: Option<SlotIndex>,
    buf: PhantomData<B>,
}

/// It never pins anything: the buffer is in the mailbox.
impl<B> Unpin for RemoteOperation<B> {}

impl<B: Send + 'static> RemoteOperation<B> {
    /// The letter at `index` is this one's, with an `Owned<B>` as its cargo.
    pub(super) fn new(shared: &Arc<Shared>, index: SlotIndex) -> Self {
        Self { shared: Arc::clone(shared), index: Some(index), buf: PhantomData }
    }

    /// Whether the result is there.
    pub fn is_done(&self) -> bool {
        self.index.is_none_or(|index| self.shared.mailbox.is_done(index))
    }

    /// Blocks until the request completes.
    ///
    /// # Panics
    ///
    /// Panics on the engine's own thread if the result is not there yet, because that thread would
    /// wait for itself ([`wait_timeout`](Self::wait_timeout) gives the operation back instead); if
    /// the result was already taken by polling; and if the engine is gone without having got the
    /// buffer back from the kernel (a descriptor of the engine was closed behind its back).
    pub fn wait(mut self) -> Outcome<B> {
        let answer = self.block(None);
        self.open(answer.expect("the engine's thread would wait for itself"))
    }

    /// As [`wait`](Self::wait), for `timeout` at most.
    ///
    /// # Errors
    ///
    /// The operation, when the time is over first. On the engine's own thread at once, if the result
    /// is not there yet: it cannot come while that thread blocks. Turn the engine, or await the
    /// operation.
    ///
    /// # Panics
    ///
    /// If the result was already taken by polling, and if the engine is gone, as for
    /// [`wait`](Self::wait).
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<Outcome<B>, Self> {
        let end = Instant::now().checked_add(timeout);
        match self.block(end) {
            Some(answer) => Ok(self.open(answer)),
            None => Err(self),
        }
    }

    /// The answer, or `None` at `end`. The engine's thread only looks: the answer comes from there.
    fn block(&self, end: Option<Instant>) -> Option<Answer<SentRequest, RawResult>> {
        let end = if self.shared.is_engine_thread() { Some(Instant::now()) } else { end };
        self.shared.mailbox.wait(self.index(), end)
    }

    fn index(&self) -> SlotIndex {
        self.index.expect("an operation is not polled after it was ready")
    }

    /// What the engine has answered.
    fn open(&mut self, (mut request, result): Answer<SentRequest, RawResult>) -> Outcome<B> {
        self.index = None;
        // SAFETY: `new` was given a letter whose cargo is an `Owned<B>`, and this is that letter.
        let owned = unsafe { request.payload.take::<Owned<B>>() };
        owned.expect("nobody else takes it").outcome(result.to_result())
    }
}

impl<B: Send + 'static> Future for RemoteOperation<B> {
    type Output = Outcome<B>;

    /// # Panics
    ///
    /// Panics when polled again after it was ready, and as [`wait`](RemoteOperation::wait) does
    /// when the engine is gone.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome<B>> {
        match self.shared.mailbox.poll(self.index(), context.waker()) {
            Some(answer) => Poll::Ready(self.open(answer)),
            None => Poll::Pending,
        }
    }
}

impl<B> Drop for RemoteOperation<B> {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            drop(self.shared.mailbox.abandon(index)); // with the buffer, if it is back
        }
    }
}

impl<B> fmt::Debug for RemoteOperation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteOperation").field("collected", &self.index.is_none()).finish()
    }
}
