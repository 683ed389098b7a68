//! The statistics of the domain.

use std::fmt;

use offlock_sync::native::atomic::Ordering::Relaxed;

use super::domain::domain;

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
    /// Objects dropped after their grace period.
    pub reclaimed: u64,
    /// Threads that have held a [`Guard`](super::Guard) since before the current grace period
    /// began.
    pub stalled_readers: usize,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} objects ({} bytes) pending, {} reclaimed; {} stalled readers",
            self.pending, self.pending_bytes, self.reclaimed, self.stalled_readers,
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
/// ```
#[must_use]
pub fn stats() -> Stats {
    let domain = domain();
    let bags = &domain.bags;
    let (pending, pending_bytes) = bags.pending();
    Stats {
        pending,
        pending_bytes,
        // Ordering: Relaxed; a statistic.
        reclaimed: bags.reclaimed.load(Relaxed),
        stalled_readers: domain.registry.stalled(domain.current_gp()),
    }
}
