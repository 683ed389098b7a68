//! The limits of a queue, and their checks.

use super::deferred::Deferred;

use crate::core::{Levels, Message, Preload};
use crate::error::{SendError, SendRefused};
use crate::waiter::Demand;

/// Places that messages below a priority leave free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserve<P> {
    pub(crate) from: P,
    pub(crate) messages: usize,
}

/// The options that are fixed when a queue is made.
pub(crate) struct Config<L: Levels> {
    pub(crate) max_messages: usize,
    pub(crate) reserves: Vec<Reserve<L::Priority>>,
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

    /// Returns the room that a message needs. Compares priorities, which may panic: callers hold no
    /// lock, or have changed nothing yet.
    #[inline(always)]
    pub(crate) fn demand(&self, priority: L::Priority) -> Demand<L::Priority> {
        Demand { priority, len_limit: self.len_limit(priority) }
    }

    /// Returns the length of the queue at which messages of this priority are refused.
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
}

// What a lock section has beside the state.

/// The limits of the queue, memory that was allocated before the lock, and actions deferred until after
/// the unlock.
///
/// It is declared before the lock's guard, so that an unwind drops it after the unlock: the drop runs
/// the actions, and frees the memory that was not used.
pub(crate) struct Section<'q, T, L: Levels> {
    pub(crate) config: &'q Config<L>,
    pub(crate) deferred: Deferred,
    pub(crate) preload: Preload<T, L>,
}
