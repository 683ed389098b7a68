//! What the front ends deliver, and the two that keep nothing else: futures and callbacks.

use crate::cargo::{Deliver, Remains, Verdict};
use crate::error::RequestError;

/// What every front end delivers: bytes transferred or the error, and the buffer.
pub type Outcome<B> = (Result<usize, RequestError>, B);

/// The future front end's cargo: only the buffer, collected by the [`Operation`].
pub(crate) struct Owned<B>(pub(crate) B);

impl<B: 'static> Deliver for Owned<B> {
    /// Only an orphan comes here: nobody waits, the buffer goes.
    fn deliver(self, _verdict: Verdict) -> Option<Remains> {
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
    fn deliver(self, verdict: Verdict) -> Option<Remains> {
        (self.done)(verdict.result(), self.buf);
        None
    }
}
