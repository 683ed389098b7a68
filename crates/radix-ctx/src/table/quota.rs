//! How many contexts a table may hold, and how much they may weigh together.
//!
//! Each limit is one atomic, which only a table with that limit has. A context counts from before it
//! is published until it is removed, whether or not a reader still uses it: so an insert that follows
//! a removal finds the room of the removed context.

use crossbeam_utils::CachePadded;
use percpu::AllocError;
use percpu::alloc::try_box;
use percpu::sync::atomic::{AtomicU64, Ordering};

use super::error::InsertRefused;

/// The limits of a table; boxed, so that a table without limits is small.
#[derive(Debug, Default)]
pub(super) struct Quota {
    contexts: Option<Box<Limit>>,
    weight: Option<Box<Limit>>,
}

/// A sum that never exceeds its limit. On a cache line of its own.
#[derive(Debug)]
struct Limit(CachePadded<Counted>);

#[derive(Debug)]
struct Counted {
    used: AtomicU64,
    most: u64,
}

/// What the live contexts of a table are together. From [`CtxTable::usage`](super::CtxTable::usage).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// How many there are, reserved ones included.
    pub contexts: u64,
    /// The sum of their weights; `None` for a table without a limit for it, which does not add them
    /// up.
    pub weight: Option<u64>,
}

impl Limit {
    fn try_new(most: u64) -> Result<Box<Self>, AllocError> {
        let counted = Counted { used: AtomicU64::new(0), most };
        try_box(Self(CachePadded::new(counted))).map_err(|_| AllocError::new())
    }

    /// Adds `n` if the sum stays within the limit. Lock-free.
    ///
    /// Never adds first and takes back after: an addition that does not fit would keep another one
    /// from the room that there is.
    fn try_add(&self, n: u64) -> bool {
        let Counted { used, most } = &*self.0;
        // Ordering: Relaxed; the exchange checks the value.
        let mut seen = used.load(Ordering::Relaxed);
        while n <= most - seen {
            // Ordering: Acquire on success pairs with the Release in `sub`: what happened before a
            // removal is visible to the insert that takes its room. Relaxed on failure: nothing is
            // used but the value.
            match used.compare_exchange_weak(seen, seen + n, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Takes back `n` of what was added. Wait-free.
    fn sub(&self, n: u64) {
        // Ordering: Release pairs with the Acquire in `try_add`.
        let before = self.0.used.fetch_sub(n, Ordering::Release);
        debug_assert!(n <= before, "{n} taken back of {before}");
    }

    fn used(&self) -> u64 {
        // Ordering: Relaxed; a statistic.
        self.0.used.load(Ordering::Relaxed)
    }
}

impl Quota {
    pub(super) fn try_new(contexts: Option<u64>, weight: Option<u64>) -> Result<Self, AllocError> {
        let contexts = contexts.map(Limit::try_new).transpose()?;
        Ok(Self { contexts, weight: weight.map(Limit::try_new).transpose()? })
    }

    #[inline(always)]
    pub(super) fn is_limited(&self) -> bool {
        self.contexts.is_some() || self.weight.is_some()
    }

    pub(super) fn is_weighted(&self) -> bool {
        self.weight.is_some()
    }

    /// Counts one more context, or nothing. Checks its own weight first, then the quota.
    ///
    /// In a table with both limits, an insert that is refused for the sum of weights holds one of the
    /// contexts' places until it returns.
    #[inline]
    pub(super) fn take(&self, weight: u64) -> Result<(), InsertRefused> {
        if self.weight.as_ref().is_some_and(|limit| weight > limit.0.most) {
            return Err(InsertRefused::TooHeavy);
        }
        if self.contexts.as_ref().is_some_and(|limit| !limit.try_add(1)) {
            return Err(InsertRefused::Quota);
        }
        if self.weight.as_ref().is_some_and(|limit| !limit.try_add(weight)) {
            self.give_back_context();
            return Err(InsertRefused::Quota);
        }
        Ok(())
    }

    /// Undoes [`take`](Self::take).
    #[inline]
    pub(super) fn give_back(&self, weight: u64) {
        self.give_back_context();
        if let Some(limit) = &self.weight {
            limit.sub(weight);
        }
    }

    fn give_back_context(&self) {
        if let Some(limit) = &self.contexts {
            limit.sub(1);
        }
    }

    /// The number of contexts, if it is limited; and the sum of weights, if that is.
    pub(super) fn usage(&self) -> (Option<u64>, Option<u64>) {
        let used = |limit: &Option<Box<Limit>>| limit.as_ref().map(|limit| limit.used());
        (used(&self.contexts), used(&self.weight))
    }
}
