//! Messages in guards, under the lock.

use percpu::AllocError;
use percpu::sync::step;

use super::deferred::catch_comparison;
use super::{Section, State};
use crate::core::{Lent, Levels};

impl<T, L: Levels> State<T, L> {
    /// Lends the next message to a guard: see [`Core::lend`].
    pub(crate) fn lend(
        &mut self,
        section: &mut Section<'_, T, L>,
    ) -> Result<Option<Lent<T, L::Priority>>, AllocError> {
        if self.core.is_empty() && !self.senders.is_empty() {
            self.admit_past_permits(section);
        }
        self.core.lend(&mut section.preload)
    }

    /// Puts a lent message back, and wakes a receiver for it. Returns the message if a comparison
    /// panicked.
    ///
    /// # Safety
    ///
    /// As for [`Core::put_back`].
    pub(crate) unsafe fn put_back(
        &mut self,
        lent: &Lent<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) -> Option<T> {
        // SAFETY: the caller keeps the contract of `put_back`.
        let put_back = || unsafe { self.core.put_back(lent, &mut section.preload) };
        if let Err(panic) = catch_comparison::<L, _>(put_back) {
            section.deferred.set_panic(panic);
            // SAFETY: nothing has changed, so the message is lent still.
            return Some(unsafe { self.take_lent(lent, section) });
        }
        step!("guard dropped: wake a receiver", self.serve_waiters(section));
        None
    }

    /// Removes a lent message, and serves the senders that wait for its room.
    ///
    /// # Safety
    ///
    /// As for [`Core::take_lent`].
    pub(crate) unsafe fn take_lent(
        &mut self,
        lent: &Lent<T, L::Priority>,
        section: &mut Section<'_, T, L>,
    ) -> T {
        // SAFETY: the caller keeps the contract of `take_lent`.
        let value = unsafe { self.core.take_lent(lent, &mut section.preload) };
        step!("guard accepted: serve the waiters", self.serve_waiters(section));
        value
    }
}
