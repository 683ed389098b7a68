//! A request that another thread sent.

use std::time::Instant;

use super::file::SharedFile;
use crate::op::{AtEof, Op};
use crate::payload::{Payload, RawResult};

/// The content of a slot of the mailbox: the request, and everything that it needs until its end.
pub(super) struct SentRequest {
    pub(super) op: Op,
    pub(super) at_eof: AtEof,
    pub(super) cancel_at: Option<Instant>,
    /// The buffer, and the callback if there is one. Both are `Send`.
    pub(super) payload: Payload,
    /// Keeps the descriptor open.
    pub(super) file: Option<SharedFile>,
}

// SAFETY: `RemoteRequest` requires `Send` of every part of `payload`. The pointer in `op` names
// memory of the buffer in `payload`, which no code uses between the submission and the completion.
unsafe impl Send for SentRequest {}

impl SentRequest {
    /// Delivers the result to the callback, or drops the buffer if there is none. Runs user code.
    pub(super) fn deliver(mut self, result: RawResult) {
        let taken = self.payload.take_erased().expect("a sent request has its payload");
        // SAFETY: the payload was taken above from `self`, which has neither moved nor been used
        // since.
        drop(unsafe { taken.deliver(result) });
    }
}
