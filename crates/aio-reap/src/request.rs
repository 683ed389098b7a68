//! A request that has not been handed over yet.

use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::core::Core;
use crate::error::{RequestError, SubmitError};
use crate::file::File;
use crate::op::{AtEof, Op};
use crate::operation::Operation;
use crate::outcome::{Callback, Owned};
use crate::payload::Deliver;
use crate::queue::{CompletionQueue, Enqueued};
use crate::slab::{CompletionTarget, Index, Slab};

/// One operation, ready to be handed to the engine by one of its front ends.
///
/// Nothing happens until [`submit`](Self::submit), [`callback`](Self::callback) or
/// [`enqueue`](Self::enqueue) takes it. Those queue the request and, unless a [`Plug`](crate::Plug)
/// holds it back or a callback is running, submit and reap before they return.
#[must_use = "a request does nothing until it is submitted"]
pub struct Request<'e, B> {
    core: &'e Rc<Core>,
    file: Option<File>,
    op: Op,
    at_eof: AtEof,
    misaligned: bool,
    cancel_at: Option<Instant>,
    buf: B,
}

/// What the caller gets back from a front end: `T`, or the request itself.
type Submitted<'e, B, T> = Result<T, SubmitError<Request<'e, B>>>;

impl<'e, B: 'static> Request<'e, B> {
    pub(crate) fn new(core: &'e Rc<Core>, file: Option<File>, op: Op, buf: B) -> Self {
        Self { core, file, op, at_eof: AtEof::Stop, misaligned: false, cancel_at: None, buf }
    }

    /// Bytes past the end of the file read as zeros instead of ending the read early.
    pub fn zero_fill(mut self) -> Self {
        self.at_eof = AtEof::ZeroFill;
        self
    }

    /// A read that meets the end of the file before its buffer is full fails with
    /// [`UnexpectedEof`](std::io::ErrorKind::UnexpectedEof); the buffer holds what was read. Writes are
    /// exact anyway.
    pub fn exact(mut self) -> Self {
        self.at_eof = AtEof::Fail;
        self
    }

    /// Cancels the request at a time, wherever it is by then; its result is then `ETIMEDOUT`, and
    /// the buffer comes back as ever.
    ///
    /// As with [`Operation::cancel`] the kernel may be unable to take it back: then it ends when it
    /// is done, with its own result. [`Operation::deadline`] ends the wait alone, and in time.
    pub fn cancel_at(mut self, at: Instant) -> Self {
        self.cancel_at = Some(at);
        self
    }

    /// As [`cancel_at`](Self::cancel_at), `time` from now; never, if that is past what the clock
    /// can tell.
    pub fn cancel_after(mut self, time: Duration) -> Self {
        self.cancel_at = self.core.instant().checked_add(time);
        self
    }

    pub(crate) fn core(&self) -> &'e Rc<Core> {
        self.core
    }

    /// It would be refused, however many slots are free.
    pub(crate) fn is_refused(&self) -> bool {
        self.misaligned || self.file.as_ref().is_some_and(|file| !file.accepts(&self.op))
    }

    /// Some vector does not fit the `O_DIRECT` file.
    pub(crate) fn misaligned(mut self, misaligned: bool) -> Self {
        self.misaligned = misaligned;
        self
    }

    /// The buffer, given back instead of submitted.
    pub fn into_buf(self) -> B {
        self.buf
    }

    /// Hands the request over; the result is awaited or waited for through the [`Operation`].
    ///
    /// A request that completes during its own submission is ready at the operation's first poll.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] gives the request back; nothing was queued.
    pub fn submit(self) -> Submitted<'e, B, Operation<B>> {
        self.submit_by(Slab::alloc)
    }

    /// As [`submit`](Self::submit), with a slot that was promised.
    pub(crate) fn submit_next(self) -> Submitted<'e, B, Operation<B>> {
        self.submit_by(Slab::alloc_promised)
    }

    #[inline]
    fn submit_by(self, alloc: fn(&mut Slab) -> Option<Index>) -> Submitted<'e, B, Operation<B>> {
        let core = self.core;
        let index = self.queue(CompletionTarget::Future, alloc, Owned)?;
        let operation = Operation::new(core, index);
        core.flush_unless_held();
        Ok(operation)
    }

    /// Hands the request over; `done` gets the result and the buffer.
    ///
    /// `done` runs once, on this thread, inside a call that reaps (see the crate's introduction).
    /// It may use the engine freely. A panic in it unwinds to that call; the engine stays sound
    /// and other completions are delivered by the next one. `done` and the buffer are stored
    /// inline: together they may take 96 bytes, checked at compile time.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] gives the request back; `done` is dropped.
    pub fn callback(
        self,
        done: impl FnOnce(Result<usize, RequestError>, B) + 'static,
    ) -> Submitted<'e, B, ()> {
        let core = self.core;
        self.queue(CompletionTarget::Callback, Slab::alloc, |buf| Callback { buf, done })?;
        core.flush_unless_held();
        Ok(())
    }

    /// Hands the request over; its completion will appear in `queue` with `token`.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] gives the request back; nothing was queued.
    pub fn enqueue(self, queue: &CompletionQueue<B>, token: u64) -> Submitted<'e, B, ()> {
        let core = self.core;
        self.queue(CompletionTarget::Queue, Slab::alloc, |buf| Enqueued {
            buf,
            queue: queue.clone(),
            token,
        })?;
        core.flush_unless_held();
        Ok(())
    }

    /// Moves the request into a slot.
    fn queue<D: Deliver>(
        self,
        target: CompletionTarget,
        alloc: fn(&mut Slab) -> Option<Index>,
        payload: impl FnOnce(B) -> D,
    ) -> Submitted<'e, B, Index> {
        let mut state = self.core.state.borrow_mut();
        if state.closed {
            return Err(SubmitError::Closed(self));
        }
        if self.is_refused() {
            return Err(SubmitError::Misaligned(self));
        }
        let completions = &mut state.completions;
        let Some(index) = alloc(&mut completions.slab) else { return Err(SubmitError::Full(self)) };
        let Self { file, op, at_eof, cancel_at, buf, .. } = self;
        // `payload` only moves its parts together: no user code runs under the borrow.
        completions.queue(index, file, op, at_eof, target, payload(buf));
        if let Some(at) = cancel_at {
            state.note_deadline(index, at);
        }
        Ok(index)
    }
}

impl<B> fmt::Debug for Request<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("op", &self.op).finish_non_exhaustive()
    }
}
