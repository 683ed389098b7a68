//! Messages in guards, under the lock.

use std::panic::{AssertUnwindSafe, catch_unwind};

use percpu::AllocError;
use percpu::sync::step;

use super::config::Config;
use super::{Deferred, State};
use crate::core::{Lent, Levels, Preload};

impl<T, L: Levels> State<T, L> {
    /// Lends the next message to a guard: see [`Core::lend`].
    pub(crate) fn lend(
        &mut self,
        config: &Config<T, L>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) -> Result<Option<Lent<T, L::Priority>>, AllocError> {
        if self.core.is_empty() && !self.senders.is_empty() {
            self.admit_past_permits(config, preload, deferred);
        }
        self.core.lend(preload)
    }

    /// Puts a lent message back, and wakes a receiver for it. Returns the message if a comparison
    /// panicked.
    ///
    /// # Safety
    ///
    /// As for [`Core::put_back`].
    pub(crate) unsafe fn put_back(
        &mut self,
        config: &Config<T, L>,
        lent: &Lent<T, L::Priority>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) -> Option<T> {
        // SAFETY: the caller keeps the contract of `put_back`.
        let put_back = || unsafe { self.core.put_back(lent, preload) };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(put_back)) {
            deferred.set_panic(panic);
            // SAFETY: nothing has changed, so the message is lent still.
            return Some(unsafe { self.take_lent(config, lent, preload, deferred) });
        }
        if self.core.len() == 1 {
            self.notify_unless_awaited(deferred);
        }
        step!(
            "guard dropped: wake a receiver",
            self.serve_waiters_of(config, preload, deferred, false)
        );
        None
    }

    /// Removes a lent message, and serves the senders that wait for its room.
    ///
    /// # Safety
    ///
    /// As for [`Core::take_lent`].
    pub(crate) unsafe fn take_lent(
        &mut self,
        config: &Config<T, L>,
        lent: &Lent<T, L::Priority>,
        preload: &mut Preload<T, L>,
        deferred: &mut Deferred,
    ) -> T {
        // SAFETY: the caller keeps the contract of `take_lent`.
        let value = unsafe { self.core.take_lent(lent, preload) };
        step!("guard accepted: serve the waiters", self.serve_waiters(config, preload, deferred));
        value
    }
}
