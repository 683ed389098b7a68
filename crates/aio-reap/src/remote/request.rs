//! A request of another thread that was not sent yet.

use std::fmt;
use std::time::{Duration, Instant};

use percpu::sync::Arc;

use super::file::SharedFile;
use super::mailbox::{SendError, SlotIndex};
use super::operation::RemoteOperation;
use super::sent::SentRequest;
use super::shared::Shared;
use crate::error::{RequestError, SubmitError};
use crate::op::{AtEof, Op};
use crate::outcome::{Callback, Owned};
use crate::payload::{Deliver, Payload};

/// One operation, ready to be sent to an engine's thread.
///
/// Nothing happens until [`submit`](Self::submit) or [`callback`](Self::callback) takes it.
#[must_use = "a request does nothing until it is submitted"]
pub struct RemoteRequest<'r, B> {
    shared: &'r Arc<Shared>,
    file: Option<SharedFile>,
    op: Op,
    at_eof: AtEof,
    cancel_at: Option<Instant>,
    misaligned: bool,
    buf: B,
}

// SAFETY: as for a `SentRequest`: the pointer in `op` names memory of `buf`, which only moves with it.
unsafe impl<B: Send> Send for RemoteRequest<'_, B> {}
// SAFETY: `&RemoteRequest` gives nobody `op` or `buf`.
unsafe impl<B: Sync> Sync for RemoteRequest<'_, B> {}

/// What the caller gets back: `T`, or the request itself.
type Submitted<'r, B, T> = Result<T, SubmitError<RemoteRequest<'r, B>>>;

impl<'r, B: Send + 'static> RemoteRequest<'r, B> {
    pub(super) fn new(shared: &'r Arc<Shared>, file: Option<&SharedFile>, op: Op, buf: B) -> Self {
        let misaligned =
            file.and_then(SharedFile::alignment).is_some_and(|align| !op.is_aligned(align));
        let (file, at_eof) = (file.cloned(), AtEof::Stop);
        Self { shared, file, op, at_eof, cancel_at: None, misaligned, buf }
    }

    /// Some vector does not fit the `O_DIRECT` file.
    pub(super) fn misaligned(mut self, misaligned: bool) -> Self {
        self.misaligned = misaligned;
        self
    }

    /// As [`Request::zero_fill`](crate::Request::zero_fill).
    pub fn zero_fill(mut self) -> Self {
        self.at_eof = AtEof::ZeroFill;
        self
    }

    /// As [`Request::exact`](crate::Request::exact).
    pub fn exact(mut self) -> Self {
        self.at_eof = AtEof::Fail;
        self
    }

    /// As [`Request::cancel_at`](crate::Request::cancel_at), from when the engine has taken the
    /// request out of the queue.
    pub fn cancel_at(mut self, at: Instant) -> Self {
        self.cancel_at = Some(at);
        self
    }

    /// As [`cancel_at`](Self::cancel_at), `time` from now.
    pub fn cancel_after(mut self, time: Duration) -> Self {
        self.cancel_at = Instant::now().checked_add(time);
        self
    }

    /// The buffer, given back instead of sent.
    pub fn into_buf(self) -> B {
        self.buf
    }

    /// Sends the request; the result is awaited or waited for through the [`RemoteOperation`].
    ///
    /// Never blocks. No allocation.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] gives the request back; nothing was sent.
    pub fn submit(self) -> Submitted<'r, B, RemoteOperation<B>> {
        let shared = self.shared;
        let index = self.send(true, Owned, |owned: Owned<B>| owned.0)?;
        Ok(RemoteOperation::new(shared, index))
    }

    /// Sends the request; `done` gets the result and the buffer, on the engine's thread.
    ///
    /// It runs once, as callbacks do there: it holds up the engine. Never blocks; no allocation:
    /// `done` and the buffer together may take 96 bytes, checked at compile time. If it panics, that
    /// unwinds to the call that turns the engine. On a thread that panics an engine drops `done`
    /// instead.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] gives the request back; `done` is dropped.
    pub fn callback(
        self,
        done: impl FnOnce(Result<usize, RequestError>, B) + Send + 'static,
    ) -> Submitted<'r, B, ()> {
        self.send(false, |buf| Callback { buf, done }, |callback| callback.buf).map(drop)
    }

    fn send<D: Deliver>(
        self,
        awaited: bool,
        load: impl FnOnce(B) -> D,
        unload: impl FnOnce(D) -> B,
    ) -> Submitted<'r, B, SlotIndex> {
        if self.misaligned {
            return Err(SubmitError::Misaligned(self));
        }
        let Self { shared, file, op, at_eof, cancel_at, misaligned, buf } = self;
        let mut payload = Payload::empty();
        payload.put(load(buf));
        let request = SentRequest { op, at_eof, cancel_at, payload, file };
        let sent = shared.mailbox.send(request, awaited).map_err(|refused| {
            let back = |mut request: SentRequest| {
                // SAFETY: put as a `D` above, and sent nowhere.
                let loaded = unsafe { request.payload.take::<D>() };
                let buf = unload(loaded.expect("nobody took it"));
                Self { shared, file: request.file.take(), op, at_eof, cancel_at, misaligned, buf }
            };
            match refused {
                SendError::Full(request) => SubmitError::Full(back(request)),
                SendError::Closed(request) => SubmitError::Closed(back(request)),
            }
        })?;
        if sent.notify {
            shared.notify();
        }
        Ok(sent.index)
    }
}

impl<B> fmt::Debug for RemoteRequest<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRequest").field("op", &self.op).finish_non_exhaustive()
    }
}
