//! The locked state of a queue, which leaves the ring as the unlocked queue needs it.

use percpu::sync::WordGuard;

use super::config::Config;
use super::state::State;
use crate::core::Levels;
use crate::staging::Ring;

/// The locked state of a queue.
pub(crate) struct LockedState<'q, T, L: Levels> {
    pub(super) ring: Option<&'q Ring<T, L::Priority>>,
    pub(super) config: &'q Config<L>,
    pub(super) guard: WordGuard<'q, State<T, L>>,
}

impl<T, L: Levels> LockedState<'_, T, L> {
    /// Makes later sends take the lock.
    pub(crate) fn shut(&mut self) {
        if let Some(ring) = self.ring {
            ring.shut(&mut self.guard.cursor);
        }
    }

    /// Opens a ring that could not be drained, if no thread or task waits and no notifier is armed.
    pub(super) fn open_undrained(&mut self) {
        if let Some(ring) = self.ring {
            if self.guard.may_open() {
                ring.open_undrained(&mut self.guard.cursor);
            }
        }
    }

    /// Drains the ring: see [`State::drain`].
    #[inline]
    pub(crate) fn drain(&mut self, upto: u64) -> bool {
        match self.ring {
            Some(ring) => self.guard.drain(ring, upto),
            None => true,
        }
    }

    /// Returns the position below which senders have reported holes.
    pub(super) fn reported(&self) -> u64 {
        self.ring.map_or(0, Ring::reported)
    }
}

/// What the queue is locked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// To see the messages whose sends have returned.
    Receive,
    /// To wait, or to arm a notifier.
    Wait,
    /// To send; a closed queue refuses that without a look at the ring.
    Send,
}

impl<T, L: Levels> std::ops::Deref for LockedState<'_, T, L> {
    type Target = State<T, L>;

    #[inline(always)]
    fn deref(&self) -> &State<T, L> {
        &self.guard
    }
}

impl<T, L: Levels> std::ops::DerefMut for LockedState<'_, T, L> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut State<T, L> {
        &mut self.guard
    }
}

impl<T, L: Levels> Drop for LockedState<'_, T, L> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(ring) = self.ring {
            self.guard.leave_ring(ring, self.config);
        }
    }
}
