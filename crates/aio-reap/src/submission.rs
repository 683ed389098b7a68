//! The future that waits for a free slot.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::core::{AdmitOnDrop, Core};
use crate::error::SubmitError;
use crate::operation::Operation;
use crate::reply::Reply;
use crate::request::Request;

/// A future that submits a request when a slot is free, from [`Request::submit_async`].
///
/// It resolves to the result of [`Request::submit`], but never to [`SubmitError::Full`]. If it is
/// dropped before, the request is not queued.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::builder().depth(1).capacity(1).build()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let both = engine.block_on(async {
///     let first = engine.write(&file, b"first".to_vec(), 0).submit_async().await?;
///     let done = first.await.0?;
///     // With a request in the only slot it would wait here for its end.
///     let second = engine.write(&file, b"second".to_vec(), 5).submit_async().await?;
///     Ok::<_, std::io::Error>(done + second.await.0?)
/// })?;
/// assert_eq!(both?, 11);
/// # Ok(())
/// # }
/// ```
#[must_use = "futures do nothing unless polled"]
pub struct Submission<'e, B: 'static, T = usize> {
    /// `None` after it resolved.
    request: Option<Request<'e, B, T>>,
    core: &'e Core,
    ticket: Option<u64>,
}

impl<'e, B: 'static, T: Reply<B>> Request<'e, B, T> {
    /// Submits the request like [`submit`](Self::submit), but waits for a free slot if there is
    /// none.
    ///
    /// Waiting futures get slots in the order of their first polls, and before requests that do not
    /// wait. A woken future must be polled or dropped: until then its slot is reserved.
    pub fn submit_async(self) -> Submission<'e, B, T> {
        Submission { core: self.core(), request: Some(self), ticket: None }
    }
}

impl<B: 'static, T> Submission<'_, B, T> {
    /// Returns whether this future may take a slot now.
    fn is_next(&self) -> bool {
        let state = self.core.state.borrow();
        let before = match self.ticket {
            Some(ticket) => state.waiting.position(ticket),
            None => state.waiting.len(),
        };
        before < state.completions.slab.free_len() || state.closed
    }

    fn leave(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let mut state = self.core.state.borrow_mut();
        let waker = state.waiting.leave(ticket);
        state.note_waiting();
        drop(state);
        drop(waker); // may run user code
    }
}

impl<B, T> Unpin for Submission<'_, B, T> {}

impl<'e, B: 'static, T: Reply<B>> Future for Submission<'e, B, T> {
    type Output = Result<Operation<B, T>, SubmitError<Request<'e, B, T>>>;

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
            Some(ticket) => state.waiting.replace_waker(ticket, waker),
        };
        drop(state);
        drop(old);
        Poll::Pending
    }
}

impl<B, T> Drop for Submission<'_, B, T> {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            let _admit = AdmitOnDrop(self.core); // the futures behind it move forward
            self.leave();
        }
    }
}

impl<B, T> fmt::Debug for Submission<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submission").field("waiting", &self.ticket.is_some()).finish()
    }
}
