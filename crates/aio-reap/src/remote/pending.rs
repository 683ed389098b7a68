//! A request of another thread while the engine has it in a slot.

use std::num::NonZeroI32;

use percpu::sync::{Arc, panicking};

use super::mailbox::SlotIndex;
use super::shared::Shared;
use crate::payload::{DeferredDrop, Deliver, RawResult};

/// The cargo of the slot in which the engine performs a letter.
pub(crate) struct PendingRemote {
    shared: Arc<Shared>,
    index: SlotIndex,
}

impl PendingRemote {
    /// For a letter that the engine took.
    pub(super) fn new(shared: &Arc<Shared>, index: SlotIndex) -> Self {
        Self { shared: Arc::clone(shared), index }
    }

    /// Ends a request that the engine never began. Runs user code, but not on a thread that panics.
    pub(crate) fn refuse(self) {
        if !panicking() {
            drop(self.deliver(CANCELLED));
        }
    }
}

impl Deliver for PendingRemote {
    /// # Panics
    ///
    /// If a callback or a wake-up does.
    fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
        let pending = std::mem::ManuallyDrop::new(self);
        // SAFETY: read once, and `pending` is not dropped.
        let shared = unsafe { std::ptr::read(&raw const pending.shared) };
        if let Some((request, result)) = shared.mailbox.finish(pending.index, result) {
            request.deliver(result);
        }
        None
    }
}

/// What a request ends with that the engine gives up.
const CANCELLED: RawResult = RawResult { done: 0, error: NonZeroI32::new(libc::ECANCELED) };

impl Drop for PendingRemote {
    /// The engine is dropped on a thread that panics: nothing is delivered any more. A callback is
    /// dropped with its buffer, as every other then.
    fn drop(&mut self) {
        drop(self.shared.mailbox.finish(self.index, CANCELLED));
    }
}
