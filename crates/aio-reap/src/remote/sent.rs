//! A request on its way from another thread.

use std::time::Instant;

use super::file::SharedFile;
use crate::op::{AtEof, Op};
use crate::payload::{Payload, RawResult};

/// What a place of the mailbox holds: the request, and what it needs until its end.
pub(super) struct SentRequest {
    pub(super) op: Op,
    pub(super) at_eof: AtEof,
    pub(super) cancel_at: Option<Instant>,
    /// The buffer, and the callback if there is one: made of parts that are `Send`.
    pub(super) payload: Payload,
    /// Keeps the descriptor open.
    pub(super) file: Option<SharedFile>,
}

// SAFETY: `RemoteRequest` asks for `Send` of all that goes into `payload`. The pointer in `op` names
// memory of the buffer in there, which nobody touches between the submission and the completion.
unsafe impl Send for SentRequest {}

impl SentRequest {
    /// Hands the verdict to the callback; without one, drops the buffer. Runs user code.
    pub(super) fn deliver(mut self, result: RawResult) {
        let taken = self.payload.take_erased().expect("whoever takes the cargo has the letter");
        // SAFETY: unloaded just above from `self`, which is not touched meanwhile.
        drop(unsafe { taken.deliver(result) });
    }
}
