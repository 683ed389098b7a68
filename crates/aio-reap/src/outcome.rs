//! The outcome of a request, and the payloads of the future and the callback front end.

use crate::error::RequestError;
use crate::payload::{DeferredDrop, Deliver, RawResult};

/// The outcome of a request: the number of bytes transferred or the error, and the buffer.
pub type Outcome<B> = (Result<usize, RequestError>, B);

/// The payload of a request that an [`Operation`](crate::Operation) collects: only the buffer.
pub(crate) struct Owned<B>(pub(crate) B);

impl<B: 'static> Deliver for Owned<B> {
    /// Drops the buffer. Only a request whose operation was dropped is delivered this way.
    fn deliver(self, _verdict: RawResult) -> Option<DeferredDrop> {
        None
    }
}

impl<B> Owned<B> {
    pub(crate) fn outcome(self, result: Result<usize, RequestError>) -> Outcome<B> {
        (result, self.0)
    }
}

/// The payload of a request with a callback: the buffer and the callback.
pub(crate) struct Callback<B, F> {
    pub(crate) buf: B,
    pub(crate) done: F,
}

impl<B: 'static, F: FnOnce(Result<usize, RequestError>, B) + 'static> Deliver for Callback<B, F> {
    fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
        (self.done)(result.to_result(), self.buf);
        None
    }
}
