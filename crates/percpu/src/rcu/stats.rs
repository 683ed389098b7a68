//! The statistics of the domain, and access to its bounds.

use std::fmt;
use std::time::Duration;

use super::bounds::Bounds;
use super::domain::domain;
use crate::sync::native::atomic::Ordering::Relaxed;

/// The numbers of retired and freed objects since the process started. Returned by [`stats`].
///
/// The fields are read one by one while other threads run, so they need not match each other
/// exactly.
///
/// ```
/// use offlock_percpu::rcu::{self, Stats};
///
/// let stats: Stats = rcu::stats();
/// if stats.stalled_readers != 0 {
///     println!("{} bytes wait for readers", stats.pending_bytes);
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Retired objects that no thread has begun to drop.
    pub pending: u64,
    /// The bytes of the pending objects.
    pub pending_bytes: u64,
    /// The age of the oldest pending object, with a resolution of some milliseconds.
    pub oldest_pending: Option<Duration>,
    /// Objects dropped after their grace period.
    pub reclaimed: u64,
    /// The bytes of the reclaimed objects.
    pub reclaimed_bytes: u64,
    /// Grace periods completed.
    pub grace_periods: u64,
    /// Heavy fences run for grace periods.
    pub heavy_fences: u64,
    /// Drops of retired objects that panicked; the memory of those objects was freed all the same.
    pub panics: u64,
    /// Threads that have held a [`Guard`](super::Guard) since before the current grace period
    /// began.
    pub stalled_readers: usize,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} objects ({} bytes) pending, the oldest for {:?}; {} objects ({} bytes) reclaimed in \
             {} grace periods with {} heavy fences, {} drops panicked; {} stalled readers",
            self.pending,
            self.pending_bytes,
            self.oldest_pending.unwrap_or_default(),
            self.reclaimed,
            self.reclaimed_bytes,
            self.grace_periods,
            self.heavy_fences,
            self.panics,
            self.stalled_readers,
        )
    }
}

/// Returns the statistics of the process.
///
/// Waits for bag locks, which are held for a few instructions. Never allocates. It takes time in
/// proportion to the number of CPUs and of threads.
///
/// ```
/// let stats = offlock_percpu::rcu::stats();
/// println!("{stats}");
/// assert!(stats.heavy_fences >= stats.grace_periods);
/// ```
#[must_use]
pub fn stats() -> Stats {
    let domain = domain();
    let bags = &domain.bags;
    let pending = bags.pending();
    let grace_periods = domain.grace_periods();
    Stats {
        pending: pending.objects,
        pending_bytes: pending.bytes,
        oldest_pending: pending.oldest,
        // Ordering: Relaxed, all; statistics.
        reclaimed: bags.reclaimed.load(Relaxed),
        reclaimed_bytes: bags.reclaimed_bytes.load(Relaxed),
        grace_periods,
        heavy_fences: domain.heavy_fences(),
        panics: bags.panics.load(Relaxed),
        stalled_readers: domain.registry.stalled(domain.current_gp()),
    }
}

/// Sets the bounds of the process. Wait-free. [`Bounds`] has an example.
pub fn set_bounds(bounds: Bounds) {
    let bags = &domain().bags;
    let age = bounds.age.as_nanos().try_into().unwrap_or(u64::MAX);
    // Ordering: Relaxed, both; bounds, which publish no other data.
    bags.bytes_bound.store(bounds.bytes as u64, Relaxed);
    bags.age_bound.store(age, Relaxed);
}

/// Returns the bounds of the process. Wait-free.
///
/// ```
/// assert!(offlock_percpu::rcu::bounds().bytes > 0);
/// ```
#[must_use]
pub fn bounds() -> Bounds {
    let bags = &domain().bags;
    // Ordering: Relaxed, both; bounds, which publish no other data.
    let age = Duration::from_nanos(bags.age_bound.load(Relaxed));
    Bounds { bytes: bags.bytes_bound.load(Relaxed) as usize, age }
}
