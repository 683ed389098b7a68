//! What is waiting, what was done, and how much may wait.

use std::fmt;
use std::time::Duration;

use super::bounds::Bounds;
use super::domain::domain;
use crate::sync::native::atomic::Ordering::Relaxed;

/// What RCU has done since the process init_domain, and what waits. From [`stats`].
///
/// Counted while others go on: the numbers need not fit each other exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Objects retired that no thread has begun to drop.
    pub pending: u64,
    /// What they hold, in bytes.
    pub pending_bytes: u64,
    /// How long the oldest of them has been waiting, to within some milliseconds.
    pub oldest_pending: Option<Duration>,
    /// Objects dropped after their grace period.
    pub reclaimed: u64,
    /// What they held, in bytes.
    pub reclaimed_bytes: u64,
    /// Grace periods completed.
    pub grace_periods: u64,
    /// Heavy fences that they took.
    pub heavy_fences: u64,
    /// Drops of retired objects that panicked; the memory of those objects was freed all the same.
    pub panics: u64,
    /// Threads that hold a [`Guard`](super::Guard) since before the current grace period began.
    pub stalled_readers: usize,
    /// [`SendGuard`](super::SendGuard)s alive.
    pub send_guards: u64,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} objects ({} bytes) pending, the oldest for {:?}; {} objects ({} bytes) reclaimed in \
             {} grace periods with {} heavy fences, {} drops panicked; {} stalled readers, {} Send \
             guards",
            self.pending,
            self.pending_bytes,
            self.oldest_pending.unwrap_or_default(),
            self.reclaimed,
            self.reclaimed_bytes,
            self.grace_periods,
            self.heavy_fences,
            self.panics,
            self.stalled_readers,
            self.send_guards,
        )
    }
}

/// Counts what waits and what was done. Blocks for a moment where another thread retires; never
/// allocates. Its time grows with the number of CPUs and of threads.
///
/// # Examples
///
/// ```
/// let stats = percpu::rcu::stats();
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
        heavy_fences: domain.heavies(),
        panics: bags.panics.load(Relaxed),
        stalled_readers: domain.registry.stalled(domain.current_gp()),
        send_guards: domain.send.alive(),
    }
}

/// Sets the bounds of the process from now on. Wait-free.
pub fn set_bounds(bounds: Bounds) {
    let bags = &domain().bags;
    let age = bounds.age.as_nanos().try_into().unwrap_or(u64::MAX);
    // Ordering: Relaxed, both; numbers on their own.
    bags.bytes_bound.store(bounds.bytes as u64, Relaxed);
    bags.age_bound.store(age, Relaxed);
}

/// The bounds in force. Wait-free.
#[must_use]
pub fn bounds() -> Bounds {
    let bags = &domain().bags;
    // Ordering: Relaxed, both; numbers on their own.
    let age = Duration::from_nanos(bags.age_bound.load(Relaxed));
    Bounds { bytes: bags.bytes_bound.load(Relaxed) as usize, age }
}
