//! A request of another thread while the engine has it in a slot.

use std::num::NonZeroI32;

use percpu::sync::{Arc, panicking};

use super::hub::Hub;
use super::mailbox::Place;
use crate::cargo::{Deliver, Remains, Verdict};

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
