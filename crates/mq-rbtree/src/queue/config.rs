//! The limits of a queue, and their checks.

use crate::core::{Levels, Message};
use crate::error::{SendError, SendRefused};

/// Places that messages below a priority leave free.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserve<P> {
    pub(super) from: P,
    pub(super) messages: usize,
}

/// The limits of a queue, fixed when it is made.
pub(crate) struct Config<L: Levels> {
    pub(crate) max_messages: usize,
    pub(super) reserves: Vec<Reserve<L::Priority>>,
}

impl<L: Levels> Config<L> {
    /// Checks a message. Refuses one that can never be sent.
    #[inline(always)]
    pub(crate) fn admit<T>(
        &self,
        value: T,
        priority: L::Priority,
    ) -> Result<Message<T, L::Priority>, SendError<T>> {
        match L::check(priority) {
            Ok(()) => Ok(Message { value, priority }),
            Err(priority) => {
                Err(SendError { value, reason: SendRefused::BadPriority { priority } })
            }
        }
    }

    /// Returns the length of the queue at which messages of this priority are refused. Compares
    /// priorities, which may panic: callers hold no lock, or have changed nothing yet.
    #[inline(always)]
    pub(crate) fn len_limit(&self, priority: L::Priority) -> usize {
        if self.reserves.is_empty() {
            self.max_messages
        } else {
            self.limit_below_reserves(priority)
        }
    }

    #[cold]
    #[inline(never)]
    fn limit_below_reserves(&self, priority: L::Priority) -> usize {
        let kept = |reserve: &&Reserve<L::Priority>| L::is_above(reserve.from, priority);
        let kept: usize = self.reserves.iter().filter(kept).map(|reserve| reserve.messages).sum();
        self.max_messages.saturating_sub(kept)
    }

    /// Returns the number of free places that a message of this priority needs.
    pub(crate) fn places_for(&self, priority: L::Priority) -> usize {
        self.max_messages - self.len_limit(priority) + 1
    }
}
