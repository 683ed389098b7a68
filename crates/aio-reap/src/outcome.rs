//! What the front ends deliver, and the two that keep nothing else: futures and callbacks.

use crate::error::RequestError;
use crate::payload::{DeferredDrop, Deliver, RawResult};

/// What every front end delivers: bytes transferred or the error, and the buffer.
pub type Outcome<B> = (Result<usize, RequestError>, B);

/// The future front end's cargo: only the buffer, collected by the [`Operation`].
pub(crate) struct Owned<B>(pub(crate) B);

impl<B: 'static> Deliver for Owned<B> {
    /// Only an orphan comes here: nobody waits, the buffer goes.
    fn deliver(self, _verdict: RawResult) -> Option<DeferredDrop> {
        None
    }
}

impl<B> Owned<B> {
    pub(crate) fn outcome(self, result: Result<usize, RequestError>) -> Outcome<B> {
        (result, self.0)
    }
}

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
