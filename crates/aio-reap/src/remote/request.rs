//! Requests of other threads that were not sent yet.

use std::fmt;
use std::time::{Duration, Instant};

use percpu::sync::Arc;

use super::file::SharedFile;
use super::mailbox::{SendError, Sent, SlotIndex};
use super::operation::RemoteOperation;
use super::sent::SentRequest;
use super::shared::Shared;
use crate::error::{RequestError, SubmitError};
use crate::held_buf::HeldBuf;
use crate::op::{AtEof, Op};
use crate::outcome::{Callback, Owned};
use crate::payload::{Deliver, Payload};

/// An operation that can be sent to an engine's thread.
///
/// It has no effect until [`submit`](Self::submit) or [`callback`](Self::callback) takes it.
///
/// ```
/// use aio_reap::{Engine, SharedFile};
/// use std::sync::mpsc;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let remote = engine.remote();
/// let file = SharedFile::new(std::fs::File::open("/dev/zero")?)?;
/// let (to_main, results) = mpsc::channel();
/// // The callback runs on the engine's thread.
/// remote.read(&file, vec![1; 512], 0).callback(move |read, _buf| _ = to_main.send(read))?;
/// drop(remote);
/// engine.serve()?;
/// assert_eq!(results.recv().unwrap()?, 512);
/// # Ok(())
/// # }
/// ```
#[must_use = "a request does nothing until it is submitted"]
pub struct RemoteRequest<'r, B> {
    shared: &'r Arc<Shared>,
    file: Option<SharedFile>,
    op: Op,
    at_eof: AtEof,
    cancel_at: Option<Instant>,
    misaligned: bool,
    buf: HeldBuf<B>,
}

// SAFETY: `buf` is `Send`, and the pointer in `op` names memory of `buf`, which moves together with
// it.
unsafe impl<B: Send> Send for RemoteRequest<'_, B> {}
// SAFETY: `&RemoteRequest` gives no access to the memory that `op` names, and none to `buf`.
unsafe impl<B: Sync> Sync for RemoteRequest<'_, B> {}

/// The name of a request with a callback of another thread, for
/// [`Remote::cancel`](crate::Remote::cancel). No later request of the engine's remotes has it (until
/// its place was used 2^32 times).
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let remote = engine.remote(); // usually of another thread
/// let id = remote.nop().callback(|result, ()| {
///     assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
/// })?;
/// assert!(remote.cancel(id));
/// engine.drain()?;
/// assert!(!remote.cancel(id)); // it has completed
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteRequestId {
    pub(super) index: SlotIndex,
    pub(super) generation: u32,
}

/// The result of a submission: `T`, or the refused request.
type Submitted<'r, B, T> = Result<T, SubmitError<RemoteRequest<'r, B>>>;

impl<'r, B: Send + 'static> RemoteRequest<'r, B> {
    pub(super) fn new(
        shared: &'r Arc<Shared>,
        file: Option<&SharedFile>,
        op: Op,
        buf: HeldBuf<B>,
    ) -> Self {
        let misaligned =
            file.and_then(SharedFile::alignment).is_some_and(|align| !op.is_aligned(align));
        let (file, at_eof) = (file.cloned(), AtEof::Stop);
        Self { shared, file, op, at_eof, cancel_at: None, misaligned, buf }
    }

    /// Records whether a vector is not aligned as the `O_DIRECT` file requires.
    pub(super) fn misaligned(mut self, misaligned: bool) -> Self {
        self.misaligned = misaligned;
        self
    }

    /// Fills the buffer with zeros after the end of the file, like
    /// [`Request::zero_fill`](crate::Request::zero_fill).
    pub fn zero_fill(mut self) -> Self {
        self.at_eof = AtEof::ZeroFill;
        self
    }

    /// Makes a short read fail, like [`Request::exact`](crate::Request::exact).
    pub fn exact(mut self) -> Self {
        self.at_eof = AtEof::Fail;
        self
    }

    /// Makes a short transfer end the request, like [`Request::partial`](crate::Request::partial).
    pub fn partial(mut self) -> Self {
        self.at_eof = AtEof::Partial;
        self
    }

    /// Cancels the request at the time `at`, like
    /// [`Request::cancel_at`](crate::Request::cancel_at), but not before the engine has taken it
    /// out of the queue.
    pub fn cancel_at(mut self, at: Instant) -> Self {
        self.cancel_at = Some(at);
        self
    }

    /// Cancels the request `time` from now, like [`cancel_at`](Self::cancel_at).
    pub fn cancel_after(mut self, time: Duration) -> Self {
        self.cancel_at = Instant::now().checked_add(time);
        self
    }

    /// Returns the buffer, instead of sending the request.
    pub fn into_buf(self) -> B {
        self.buf.into_inner()
    }

    /// Sends the request. The [`RemoteOperation`] awaits the result or blocks for it.
    ///
    /// Never blocks and never allocates.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] returns the request, which was not sent.
    pub fn submit(self) -> Submitted<'r, B, RemoteOperation<B>> {
        let shared = self.shared;
        let sent = self.send(true, Owned::<B>::new, Owned::into_buf)?;
        Ok(RemoteOperation::new(shared, sent.index))
    }

    /// Sends the request. `done` gets the result and the buffer, on the engine's thread. The id is
    /// for [`Remote::cancel`](crate::Remote::cancel).
    ///
    /// `done` runs once, and the engine waits until it returns. This function never blocks and
    /// never allocates: `done` and the buffer together may take 96 bytes, which is checked at
    /// compile time. A panic in `done` unwinds to the call that turns the engine. An engine on a
    /// thread that panics drops `done` instead.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] returns the request. `done` is dropped.
    pub fn callback(
        self,
        done: impl FnOnce(Result<usize, RequestError>, B) + Send + 'static,
    ) -> Submitted<'r, B, RemoteRequestId> {
        let sent = self.send(false, |buf| Callback::<B, _>::new(buf, done), Callback::into_buf)?;
        Ok(RemoteRequestId { index: sent.index, generation: sent.generation })
    }

    fn send<D: Deliver>(
        self,
        awaited: bool,
        load: impl FnOnce(HeldBuf<B>) -> D,
        unload: impl FnOnce(D) -> HeldBuf<B>,
    ) -> Submitted<'r, B, Sent> {
        if self.misaligned {
            return Err(SubmitError::Misaligned(self));
        }
        let Self { shared, file, op, at_eof, cancel_at, misaligned, buf } = self;
        let mut payload = Payload::empty();
        payload.put(load(buf));
        let request = SentRequest { op, at_eof, cancel_at, payload, file };
        let sent = shared.mailbox.send(request, awaited).map_err(|refused| {
            let back = |mut request: SentRequest| {
                // SAFETY: `load` made the payload above from a `D`, and the request was not sent.
                let loaded = unsafe { request.payload.take::<D>() };
                let buf = unload(loaded.expect("the payload was stored above"));
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
        Ok(sent)
    }
}

impl<B> fmt::Debug for RemoteRequest<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRequest").field("op", &self.op).finish_non_exhaustive()
    }
}
