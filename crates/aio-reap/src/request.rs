//! A request that was not submitted yet.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use crate::buf::HeldBuf;
use crate::core::{AdmitOnDrop, Core};
use crate::error::{RequestError, SubmitError};
use crate::file::File;
use crate::op::Op;
use crate::operation::Operation;
use crate::payload::{Delivery, Receive, Reply};
use crate::queue::{CompletionQueue, Enqueued};
use crate::slab::{CompletionTarget, Index, RequestId, Slab};

/// An operation that one of the front ends can submit.
///
/// A request has no effect until [`submit`](Self::submit), [`callback`](Self::callback) or
/// [`enqueue`](Self::enqueue) takes it. These queue the request. They also submit and reap before they
/// return, unless a [`Plug`](crate::Plug) holds it back, a callback or a call of another thread is
/// running, or it is made in [`block_on`](crate::Engine::block_on) or while a driver is there
/// (`Engine::drive`): then one submission follows for all.
///
/// `B` is the buffer, which comes back with the result, and `T` the type of the [result](Reply).
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let request = engine.read(&file, vec![7; 16], 0).zero_fill();
/// let (read, buf) = request.submit()?.wait(); // only now it has an effect
/// assert_eq!((read?, buf), (16, vec![0; 16])); // the file is empty
/// # Ok(())
/// # }
/// ```
#[must_use = "a request does nothing until it is submitted"]
pub struct Request<'e, B, T = usize> {
    core: &'e Rc<Core>,
    file: Option<File>,
    op: Op,
    zero_fill: bool,
    refusal: Option<Refusal>,
    cancel_at: Option<Instant>,
    buf: HeldBuf<B>,
    result: PhantomData<fn() -> T>,
}

/// The reason why the engine refuses a request even if slots are free.
#[derive(Clone, Copy)]
pub(crate) enum Refusal {
    Misaligned,
    InvalidPath,
}

/// The result of a front end: `S`, or the refused request.
pub(crate) type Submitted<'e, B, T, S> = Result<S, SubmitError<Request<'e, B, T>>>;

impl<'e, B: 'static, T: Reply<B>> Request<'e, B, T> {
    pub(crate) fn new(core: &'e Rc<Core>, file: Option<File>, op: Op, buf: HeldBuf<B>) -> Self {
        Self {
            core,
            file,
            op,
            zero_fill: false,
            refusal: None,
            cancel_at: None,
            buf,
            result: PhantomData,
        }
    }

    /// Makes a read fill the buffer with zeros after the end of the file, instead of ending early.
    pub fn zero_fill(mut self) -> Self {
        self.zero_fill = true;
        self
    }

    /// Cancels the request at the time `at`. Its result is then `ETIMEDOUT`, and the buffer comes
    /// back as usual.
    ///
    /// As for [`Operation::cancel`], the kernel may be unable to cancel it. It then completes with
    /// its own result, and so does a close.
    pub fn cancel_at(mut self, at: Instant) -> Self {
        self.cancel_at = Some(at);
        self
    }

    /// Records the `refusal` of a request that is not `valid`.
    pub(crate) fn check(mut self, valid: bool, refusal: Refusal) -> Self {
        self.refusal = (!valid).then_some(refusal);
        self
    }

    /// Returns the buffer, instead of a submission.
    pub fn into_buf(self) -> B {
        self.buf.into_inner()
    }

    /// Submits the request. The [`Operation`] awaits the result or blocks for it.
    ///
    /// If the request completes during this call, the operation is ready at its first poll.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] returns the request, which was not queued.
    pub fn submit(self) -> Submitted<'e, B, T, Operation<B, T>> {
        self.submit_by(Slab::alloc)
    }

    /// Submits the request with a promised slot.
    pub(crate) fn submit_next(self) -> Submitted<'e, B, T, Operation<B, T>> {
        self.submit_by(Slab::alloc_promised)
    }

    #[inline]
    fn submit_by(
        self,
        alloc: fn(&mut Slab) -> Option<Index>,
    ) -> Submitted<'e, B, T, Operation<B, T>> {
        let core = self.core;
        let RequestId(user_data) = self.queue(CompletionTarget::Future, alloc, ())?;
        let operation = Operation::new(core, user_data as Index); // the slot of the request
        core.flush_unless_held(true);
        Ok(operation)
    }

    /// Submits the request. `done` gets the result and the buffer. The id is for
    /// [`Engine::cancel`](crate::Engine::cancel).
    ///
    /// `done` runs once, on this thread, inside a call that reaps (see the crate documentation). It
    /// may use the engine. A panic in `done` unwinds to that call. The engine stays consistent, and
    /// the next call delivers the other completions. `done` and the buffer are stored in the slot:
    /// together they may take 96 bytes, which is checked at compile time.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] returns the request. `done` is dropped.
    pub fn callback(
        self,
        done: impl FnOnce(Result<T, RequestError>, B) + 'static,
    ) -> Submitted<'e, B, T, RequestId> {
        let core = self.core;
        let id = self.queue(CompletionTarget::Callback, Slab::alloc, done)?;
        core.flush_unless_held(true);
        Ok(id)
    }

    /// Submits the request like [`callback`](Self::callback), but runs no callback and wakes no task
    /// before it returns. `done`, and what is ready already, waits for the next call that reaps, such as
    /// [`Engine::turn`](crate::Engine::turn). For a library that uses the engine of its caller, whose
    /// callbacks must not run inside a call of the library.
    ///
    /// # Errors
    ///
    /// Those of [`callback`](Self::callback).
    pub fn callback_on_turn(
        self,
        done: impl FnOnce(Result<T, RequestError>, B) + 'static,
    ) -> Submitted<'e, B, T, RequestId> {
        let core = self.core;
        let id = self.queue(CompletionTarget::Callback, Slab::alloc, done)?;
        core.flush_unless_held(false);
        Ok(id)
    }

    /// Submits the request. Its completion will appear in `queue` with `token`. The id is for
    /// [`Engine::cancel`](crate::Engine::cancel).
    ///
    /// # Errors
    ///
    /// [`SubmitError`] returns the request, which was not queued.
    pub fn enqueue(
        self,
        queue: &CompletionQueue<B, T>,
        token: u64,
    ) -> Submitted<'e, B, T, RequestId> {
        let core = self.core;
        let receiver = Enqueued { queue: queue.clone(), token };
        let id = self.queue(CompletionTarget::Queue, Slab::alloc, receiver)?;
        core.flush_unless_held(true);
        Ok(id)
    }

    /// Moves the request into a slot.
    fn queue(
        self,
        target: CompletionTarget,
        alloc: fn(&mut Slab) -> Option<Index>,
        receiver: impl Receive<B, T>,
    ) -> Submitted<'e, B, T, RequestId> {
        let state = &mut *self.core.state.borrow_mut();
        if state.closed {
            return Err(SubmitError::Closed(self));
        }
        match self.refusal {
            None => {}
            Some(Refusal::Misaligned) => return Err(SubmitError::Misaligned(self)),
            Some(Refusal::InvalidPath) => return Err(SubmitError::InvalidPath(self)),
        }
        let completions = &mut state.completions;
        let Some(index) = alloc(&mut completions.slab) else { return Err(SubmitError::Full(self)) };
        let Self { file, op, zero_fill, cancel_at, buf, .. } = self;
        let delivery = Delivery::new(buf, receiver);
        let user_data = state.queue(index, file, op.by_fields(), zero_fill, target, delivery);
        if let Some(at) = cancel_at {
            state.deadlines.add(at, index, &state.completions.slab);
        }
        Ok(RequestId(user_data))
    }
}

impl<B, T> fmt::Debug for Request<'_, B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("op", &self.op).finish_non_exhaustive()
    }
}

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
        Submission { core: self.core, request: Some(self), ticket: None }
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
        let refused = this.request.as_ref().expect("not polled after it was ready").refusal;
        if refused.is_some() || this.is_next() {
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
