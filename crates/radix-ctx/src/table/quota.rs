//! The limits on the number of contexts of a table and on the sum of their weights.
//!
//! A limit is one atomic, and only a table with that limit has it. A context counts from before it is
//! live until it is removed, even if a reader still uses it. So an insert that follows a removal can
//! take the place of the removed context.

use crossbeam_utils::CachePadded;
use percpu::AllocError;
use percpu::alloc::try_box;
use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::order;

use super::error::InsertRefused;

/// The limits of a table. They are boxed, so that a table without limits is small.
#[derive(Debug, Default)]
pub(super) struct Quota {
    contexts: Option<Box<Limit>>,
    weight: Option<Box<Limit>>,
}

/// A sum that never exceeds its limit, on a cache line of its own.
#[derive(Debug)]
struct Limit(CachePadded<Counted>);

#[derive(Debug)]
struct Counted {
    used: AtomicU64,
    most: u64,
}

/// The use of the limits of a table. Returned by [`CtxTable::usage`](super::CtxTable::usage).
///
/// ```
/// use radix_ctx::CtxTable;
///
/// let table = CtxTable::builder().max_weight(100).build()?;
/// let id = table.insert_weighted("alice", 60).unwrap();
/// assert_eq!((table.usage().contexts, table.usage().weight), (1, Some(60)));
/// table.remove(id).unwrap();
/// assert_eq!(table.usage().weight, Some(0)); // at once, before the drop
/// # Ok::<(), radix_ctx::AllocError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The number of live contexts and of reservations.
    pub contexts: u64,
    /// The sum of their weights, or `None` for a table without a limit for it.
    pub weight: Option<u64>,
}

impl Limit {
    fn try_new(most: u64) -> Result<Box<Self>, AllocError> {
        let counted = Counted { used: AtomicU64::new(0), most };
        try_box(Self(CachePadded::new(counted))).map_err(|_| AllocError::new())
    }

    /// Adds `n` if the sum stays within the limit. Lock-free.
    ///
    /// Never adds first and subtracts after a check: such an add could make another thread's add fail
    /// that fits.
    fn try_add(&self, n: u64) -> bool {
        let Counted { used, most } = &*self.0;
        // Ordering: Relaxed; the exchange checks the value.
        let mut seen = used.load(Ordering::Relaxed);
        while n <= most - seen {
            // Ordering: Acquire on success pairs with the Release in `sub`; it carries what happened
            // before the removal to the insert that takes its place. Relaxed on failure: only the
            // value is used.
            let order = order!(Acquire, "try_add: what came before the removal");
            match used.compare_exchange_weak(seen, seen + n, order, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Subtracts `n`, which was added before. Wait-free.
    fn sub(&self, n: u64) {
        // Ordering: Release pairs with the Acquire in `try_add`; it carries what happened before the
        // removal.
        let order = order!(Release, "sub: the sum carries what came before the removal");
        let before = self.0.used.fetch_sub(n, order);
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

    /// Counts one more context, or returns an error and counts nothing. Checks the weight alone first,
    /// then the sums.
    ///
    /// In a table with both limits, an insert that is refused for the sum of the weights counts as a
    /// context until it returns.
    #[inline]
    pub(super) fn take(&self, weight: u64) -> Result<(), InsertRefused> {
        if let Some(limit) = self.weight.as_ref().map(|limit| limit.0.most) {
            if weight > limit {
                return Err(InsertRefused::TooHeavy { weight, limit });
            }
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

    /// Reverses [`take`](Self::take).
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

    /// Returns the number of contexts and the sum of the weights, each if it is limited.
    pub(super) fn usage(&self) -> (Option<u64>, Option<u64>) {
        let used = |limit: &Option<Box<Limit>>| limit.as_ref().map(|limit| limit.used());
        (used(&self.contexts), used(&self.weight))
    }
}
