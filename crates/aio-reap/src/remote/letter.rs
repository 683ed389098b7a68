//! A request on its way from another thread.

use std::num::NonZeroI32;
use std::time::Instant;

use percpu::sync::{Arc, panicking};

use super::mailbox::Place;
use super::{Hub, SharedFile};
use crate::cargo::{Cargo, Deliver, Remains, Verdict};
use crate::op::{AtEnd, Op};

/// What a place of the mailbox holds: the request, and what it needs until its end.
pub(super) struct Letter {
    pub(super) op: Op,
    pub(super) at_end: AtEnd,
    pub(super) cancel_at: Option<Instant>,
    /// The buffer, and the callback if there is one: made of parts that are `Send`.
    pub(super) cargo: Cargo,
    /// Keeps the descriptor open.
    pub(super) file: Option<SharedFile>,
}

// SAFETY: `RemoteRequest` asks for `Send` of all that goes into `cargo`. The pointer in `op` names
// memory of the buffer in there, which nobody touches between the submission and the completion.
unsafe impl Send for Letter {}

impl Letter {
    /// Hands the verdict to the callback; without one, drops the buffer. Runs user code.
    fn deliver(mut self, verdict: Verdict) {
        let parcel = self.cargo.unload().expect("whoever takes the cargo has the letter");
        // SAFETY: unloaded just above from `self`, which is not touched meanwhile.
        drop(unsafe { parcel.deliver(verdict) });
    }
}

/// The cargo of the slot in which the engine performs a letter.
pub(crate) struct Errand {
    hub: Arc<Hub>,
    place: Place,
}

impl Errand {
    /// For a letter that the engine took.
    pub(super) fn new(hub: &Arc<Hub>, place: Place) -> Self {
        Self { hub: Arc::clone(hub), place }
    }

    /// Ends a request that the engine never began. Runs user code, but not on a thread that panics.
    pub(crate) fn refuse(self) {
        if !panicking() {
            drop(self.deliver(CANCELLED));
        }
    }
}

impl Deliver for Errand {
    /// # Panics
    ///
    /// If a callback or a wake-up does.
    fn deliver(self, verdict: Verdict) -> Option<Remains> {
        let errand = std::mem::ManuallyDrop::new(self);
        // SAFETY: read once, and `errand` is not dropped.
        let hub = unsafe { std::ptr::read(&raw const errand.hub) };
        if let Some((letter, verdict)) = hub.mailbox.finish(errand.place, verdict) {
            letter.deliver(verdict);
        }
        None
    }
}

/// What a request ends with that the engine gives up.
const CANCELLED: Verdict = Verdict { done: 0, error: NonZeroI32::new(libc::ECANCELED) };

impl Drop for Errand {
    /// The engine is dropped on a thread that panics: nothing is delivered any more. A callback is
    /// dropped with its buffer, as every other then.
    fn drop(&mut self) {
        drop(self.hub.mailbox.finish(self.place, CANCELLED));
    }
}
