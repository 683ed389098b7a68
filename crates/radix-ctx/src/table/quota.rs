//! The limit on the number of contexts of a table.
//!
//! A context counts from before it is live until it is removed, even if a reader still uses it. So an
//! insert that follows a removal can take the place of the removed context.

use crossbeam_utils::CachePadded;
use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::order;

/// A number of contexts that never exceeds its limit, on a cache line of its own, so that a table without
/// a limit is small.
#[derive(Debug)]
pub(super) struct Quota(Option<Box<CachePadded<Counted>>>);

#[derive(Debug)]
struct Counted {
    used: AtomicU64,
    most: u64,
}

impl Quota {
    pub(super) fn new(most: Option<u64>) -> Self {
        let counted = |most| Box::new(CachePadded::new(Counted { used: AtomicU64::new(0), most }));
        Self(most.map(counted))
    }

    /// Counts one more context, or returns the limit as an error and counts nothing. Lock-free.
    ///
    /// Never adds first and subtracts after a check: such an add could make another thread's add fail
    /// that fits.
    #[inline]
    pub(super) fn take(&self) -> Result<(), u64> {
        let Some(counted) = &self.0 else { return Ok(()) };
        let Counted { used, most } = &***counted;
        // Ordering: Relaxed; the exchange checks the value.
        let mut seen = used.load(Ordering::Relaxed);
        while seen < *most {
            // Ordering: Acquire on success pairs with the Release in `give_back`; it carries what happened
            // before the removal to the insert that takes its place. Relaxed on failure: only the
            // value is used.
            let order = order!(Acquire, "take: what came before the removal");
            match used.compare_exchange_weak(seen, seen + 1, order, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
        Err(*most)
    }

    /// Reverses [`take`](Self::take) for `contexts` contexts. Wait-free.
    #[inline]
    pub(super) fn give_back(&self, contexts: u64) {
        if let Some(counted) = &self.0 {
            // Ordering: Release pairs with the Acquire in `take`; it carries what happened before the
            // removal.
            let order =
                order!(Release, "give back: the number carries what came before the removal");
            let before = counted.used.fetch_sub(contexts, order);
            debug_assert!(contexts <= before, "{contexts} given back of {before}");
        }
    }
}
