//! The bounds of the memory that waits to be freed.

use std::time::Duration;

/// The bytes that may wait, and how long, before a retiring thread tries to free retired objects.
///
/// A stalled reader delays more memory than that, because retiring never waits for readers.
///
/// ```
/// use offlock_percpu::rcu::{self, Bounds};
/// use std::time::Duration;
///
/// let bounds = Bounds::new(1 << 20, Duration::from_millis(50));
/// rcu::set_bounds(bounds);
/// assert_eq!(rcu::bounds(), bounds);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bounds {
    /// The bytes that may wait on one CPU. 4 MiB if not set; a guess. The size of a retired value
    /// counts without the memory that the value owns;
    /// [`Unlinked::retire_sized`](super::Unlinked::retire_sized) and [`defer`](super::defer) take
    /// the size of that memory as an argument.
    pub bytes: usize,
    /// How long the oldest object on a CPU may wait for its batch to fill. 100 ms if not set; a
    /// guess. Each object retired on that CPU checks it while the batch has up to 64 objects, and
    /// every sixteenth object after that. Where no object is retired, only
    /// [`poll`](super::poll) frees. The clock has a resolution of some milliseconds.
    pub age: Duration,
}

impl Bounds {
    pub(super) const DEFAULT: Self = Self { bytes: 4 << 20, age: Duration::from_millis(100) };

    /// Returns bounds of `bytes` per CPU and of `age`.
    #[must_use]
    pub const fn new(bytes: usize, age: Duration) -> Self {
        Self { bytes, age }
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Self::DEFAULT
    }
}
