//! A request of another thread that the engine has taken.

use std::num::NonZeroI32;

use percpu::sync::{Arc, panicking};

use super::mailbox::SlotIndex;
use super::shared::Shared;
use crate::payload::{DeferredDrop, Deliver, RawResult};

/// The payload of the engine's slot that performs a request of another thread.
pub(crate) struct PendingRemote {
    shared: Arc<Shared>,
    index: SlotIndex,
}

impl PendingRemote {
    /// Makes the pending operation of the request at `index`, which the engine took from the
    /// mailbox.
    pub(super) fn new(shared: &Arc<Shared>, index: SlotIndex) -> Self {
        Self { shared: Arc::clone(shared), index }
    }

    /// Ends a request that the engine did not begin, with ECANCELED. Runs user code, but not on a
    /// thread that panics.
    pub(crate) fn refuse(self) {
        if !panicking() {
            drop(self.deliver(CANCELLED));
        }
    }
}

impl Deliver for PendingRemote {
    /// # Panics
    ///
    /// Panics if a callback or a wake-up panics.
    fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
        let pending = std::mem::ManuallyDrop::new(self);
        // SAFETY: the field is read once, and `pending` is not dropped.
        let shared = unsafe { std::ptr::read(&raw const pending.shared) };
        if let Some((request, result)) = shared.mailbox.finish(pending.index, result) {
            request.deliver(result);
        }
        None
    }
}

/// The result of a request that the engine did not begin.
const CANCELLED: RawResult = RawResult { done: 0, error: NonZeroI32::new(libc::ECANCELED) };

impl Drop for PendingRemote {
    /// Ends the request if the engine is dropped on a thread that panics. A callback is then
    /// dropped with its buffer, like those of the engine's own requests.
    fn drop(&mut self) {
        drop(self.shared.mailbox.finish(self.index, CANCELLED));
    }
}
