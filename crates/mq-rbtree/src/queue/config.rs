//! The limits of a queue, and their checks.

use crate::core::{Levels, Message};
use crate::error::{SendError, SendRefused};
use crate::waiter::Demand;

/// Places that messages below a priority leave free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserve<P> {
    pub(crate) from: P,
    pub(crate) messages: usize,
}

/// The options that are fixed when a queue is made.
pub(crate) struct Config<T, L: Levels> {
    pub(crate) max_messages: usize,
    pub(crate) max_bytes: u64,
    pub(crate) max_message_bytes: u32,
    pub(crate) measure: Option<fn(&T) -> usize>,
    pub(crate) reserves: Vec<Reserve<L::Priority>>,
    pub(crate) time_lock: bool,
}

impl<T, L: Levels> Config<T, L> {
    /// Checks and measures a message. Refuses one that can never be sent. Runs the user's `measure`, so
    /// the lock is not held.
    #[inline(always)]
    pub(crate) fn admit(
        &self,
        value: T,
        priority: L::Priority,
    ) -> Result<Message<T, L::Priority>, SendError<T>> {
        match self.check(&value, priority) {
            Ok(bytes) => Ok(Message { value, priority, bytes }),
            Err(reason) => Err(SendError { value, reason }),
        }
    }

    /// Returns a message's length in bytes, or the reason why it can never be sent. Runs the user's
    /// `measure`, so the lock is not held.
    #[inline(always)]
    pub(crate) fn check(&self, value: &T, priority: L::Priority) -> Result<u32, SendRefused> {
        L::check(priority).map_err(|priority| SendRefused::BadPriority { priority })?;
        let Some(measure) = self.measure else { return Ok(0) };
        let limit = self.max_message_bytes;
        match u32::try_from(measure(value)) {
            Ok(bytes) if bytes <= limit => Ok(bytes),
            _ => Err(SendRefused::TooLong { limit }),
        }
    }

    /// Returns the room that a message needs. Compares priorities, which may panic: callers hold no
    /// lock, or have changed nothing yet.
    #[inline(always)]
    pub(crate) fn demand(&self, priority: L::Priority, bytes: u32) -> Demand<L::Priority> {
        Demand { priority, bytes, len_limit: self.len_limit(priority) }
    }

    /// Returns whether a message has room in a queue of this length and so many bytes.
    #[inline(always)]
    pub(crate) fn has_room(&self, len: usize, bytes: u64, demand: Demand<L::Priority>) -> bool {
        self.fits_without_reserves(len, bytes, demand) && len < demand.len_limit
    }

    /// Returns whether a message would have room if no places were reserved.
    #[inline(always)]
    pub(crate) fn fits_without_reserves(
        &self,
        len: usize,
        bytes: u64,
        demand: Demand<L::Priority>,
    ) -> bool {
        len < self.max_messages && bytes + u64::from(demand.bytes) <= self.max_bytes
    }

    /// Returns whether no message has room, of any priority.
    pub(crate) fn is_full(&self, len: usize, bytes: u64) -> bool {
        len >= self.max_messages || (self.max_bytes > 0 && bytes >= self.max_bytes)
    }

    /// Returns the length of the queue at which messages of this priority are refused.
    #[inline(always)]
    fn len_limit(&self, priority: L::Priority) -> usize {
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
