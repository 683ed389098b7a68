//! A request of another thread that was not sent yet.

use std::fmt;
use std::time::{Duration, Instant};

use percpu::sync::Arc;

use super::file::SharedFile;
use super::hub::Hub;
use super::letter::Letter;
use super::mailbox::{Place, Unsent};
use super::operation::RemoteOperation;
use crate::cargo::{Cargo, Deliver};
use crate::error::{RequestError, SubmitError};
use crate::op::{AtEnd, Op};
use crate::outcome::{Callback, Owned};

/// One operation, ready to be sent to an engine's thread.
///
/// Nothing happens until [`submit`](Self::submit) or [`callback`](Self::callback) takes it.
#[must_use = "a request does nothing until it is submitted"]
pub struct RemoteRequest<'r, B> {
    hub: &'r Arc<Hub>,
    file: Option<SharedFile>,
    op: Op,
    at_end: AtEnd,
    cancel_at: Option<Instant>,
    misaligned: bool,
    buf: B,
}

// SAFETY: as for a `Letter`: the pointer in `op` names memory of `buf`, which only moves with it.
unsafe impl<B: Send> Send for RemoteRequest<'_, B> {}
// SAFETY: `&RemoteRequest` gives nobody `op` or `buf`.
unsafe impl<B: Sync> Sync for RemoteRequest<'_, B> {}

/// What the caller gets back: `T`, or the request itself.
type Submitted<'r, B, T> = Result<T, SubmitError<RemoteRequest<'r, B>>>;

impl<'r, B: Send + 'static> RemoteRequest<'r, B> {
    pub(super) fn new(hub: &'r Arc<Hub>, file: Option<&SharedFile>, op: Op, buf: B) -> Self {
        let misaligned =
            file.and_then(SharedFile::alignment).is_some_and(|align| !op.is_aligned(align));
        let (file, at_end) = (file.cloned(), AtEnd::Stop);
        Self { hub, file, op, at_end, cancel_at: None, misaligned, buf }
    }

    /// Some vector does not fit the `O_DIRECT` file.
    pub(super) fn misaligned(mut self, misaligned: bool) -> Self {
        self.misaligned = misaligned;
        self
    }

    /// As [`Request::zero_fill`](crate::Request::zero_fill).
    pub fn zero_fill(mut self) -> Self {
        self.at_end = AtEnd::ZeroFill;
        self
    }

    /// As [`Request::exact`](crate::Request::exact).
    pub fn exact(mut self) -> Self {
        self.at_end = AtEnd::Fail;
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
        let hub = self.hub;
        let place = self.send(true, Owned, |owned: Owned<B>| owned.0)?;
        Ok(RemoteOperation::new(hub, place))
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
        attended: bool,
        load: impl FnOnce(B) -> D,
        unload: impl FnOnce(D) -> B,
    ) -> Submitted<'r, B, Place> {
        if self.misaligned {
            return Err(SubmitError::Misaligned(self));
        }
        let Self { hub, file, op, at_end, cancel_at, misaligned, buf } = self;
        let mut cargo = Cargo::empty();
        cargo.put(load(buf));
        let letter = Letter { op, at_end, cancel_at, cargo, file };
        let sent = hub.mailbox.send(letter, attended).map_err(|unsent| {
            let back = |mut letter: Letter| {
                // SAFETY: put as a `D` above, and sent nowhere.
                let loaded = unsafe { letter.cargo.take::<D>() };
                let buf = unload(loaded.expect("nobody took it"));
                Self { hub, file: letter.file.take(), op, at_end, cancel_at, misaligned, buf }
            };
            match unsent {
                Unsent::Full(letter) => SubmitError::Full(back(letter)),
                Unsent::Closed(letter) => SubmitError::Closed(back(letter)),
            }
        })?;
        if sent.ring {
            hub.ring();
        }
        Ok(sent.place)
    }
}

impl<B> fmt::Debug for RemoteRequest<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRequest").field("op", &self.op).finish_non_exhaustive()
    }
}
