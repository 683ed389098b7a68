//! How long hits and misses take.
//!
//! ```text
//!  ns   0 1 2 .. 15 | 16-17 .. 30-31 | 32-35 .. 60-63 | ...      8 buckets for each doubling
//! ```

use std::fmt;
use std::time::{Duration, Instant};

use percpu::sync::atomic::{AtomicU64, Ordering};

/// Steps of each doubling, as a power of two: a time is known to 1 part in 8.
const BITS: u32 = 3;
const BUCKETS: usize = (65 - BITS as usize) << BITS;

fn bucket(value: u64) -> usize {
    let shift = (u64::BITS - 1 - (value | 1).leading_zeros()).saturating_sub(BITS);
    ((shift as usize) << BITS) + (value >> shift) as usize
}

/// The largest value of a bucket.
fn largest(bucket: usize) -> u64 {
    let shift = (bucket >> BITS).saturating_sub(1);
    let steps = (bucket - (shift << BITS)) as u64;
    (steps << shift) | ((1 << shift) - 1)
}

/// Counted by all threads.
#[derive(Debug)]
pub(crate) struct Counts {
    of: Box<[AtomicU64]>,
    /// What a look at the clock takes, measured once: a third look at each time would be a tenth of a miss.
    look: Duration,
}

/// The shortest of a few looks at the clock.
fn look() -> Duration {
    (0..16).map(|_| Instant::now().elapsed()).min().unwrap_or_default()
}

impl Counts {
    pub(crate) fn new() -> Self {
        // A model counts nothing, and has no room for that many.
        let buckets = if cfg!(any(offlock_loom, offlock_shuttle)) { 0 } else { BUCKETS };
        let look = if buckets > 0 { look() } else { Duration::ZERO };
        Self { of: (0..buckets).map(|_| AtomicU64::new(0)).collect(), look }
    }

    /// Adds the time since then, less what it takes to look at the clock.
    pub(crate) fn add(&self, since: Instant) {
        let time = since.elapsed().saturating_sub(self.look);
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.of.get(bucket(nanoseconds)) {
            count.fetch_add(1, Ordering::Relaxed); // a statistic
        }
    }

    pub(crate) fn snapshot(&self) -> Histogram {
        // Ordering: Relaxed; a statistic, each count by itself.
        Histogram(self.of.iter().map(|count| count.load(Ordering::Relaxed)).collect())
    }
}

/// How often which time occurred: exact below 16 ns, then to 1 part in 8. From
/// [`Cache::times`](crate::Cache::times).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram(Box<[u64]>);

impl Histogram {
    /// How many times it has.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The time that `percent` of all were not above; `None` if there are none.
    pub fn percentile(&self, percent: f64) -> Option<Duration> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = ((percent / 100.0 * count as f64).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        let reaches = |&(_, &count): &(usize, &u64)| {
            seen += count;
            seen >= rank
        };
        let (bucket, _) = self.0.iter().enumerate().find(reaches)?;
        Some(Duration::from_nanos(largest(bucket)))
    }
}

impl fmt::Display for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} timed", self.count())?;
        for percent in [50.0, 90.0, 99.0, 99.9] {
            if let Some(time) = self.percentile(percent) {
                write!(f, ", p{percent} {time:?}")?;
            }
        }
        Ok(())
    }
}

/// How long gets took, and locks were held. From [`Cache::times`](crate::Cache::times).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Times {
    /// One of 4,096 hits of each thread is made once more, for the clock: of a buffer that was just found.
    pub hits: Histogram,
    /// Gets that read the device, or waited for who did, but those of tasks.
    pub misses: Histogram,
    /// How long locks were held, each time; with [`Builder::time_locks`](crate::Builder::time_locks) only.
    pub holds: Option<Histogram>,
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hits: {}; misses: {}", self.hits, self.misses)?;
        match &self.holds {
            Some(holds) => write!(f, "; locks: {holds}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_ends_where_the_next_begins() {
        for at in 0..BUCKETS - 1 {
            assert_eq!(bucket(largest(at)), at);
            assert_eq!(bucket(largest(at) + 1), at + 1);
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_the_largest_of_their_bucket() {
        let mut counts = vec![0; BUCKETS];
        assert_eq!(Histogram(counts.clone().into()).percentile(50.0), None);
        counts[bucket(10)] = 90;
        counts[bucket(1000)] = 10;
        let histogram = Histogram(counts.into());
        let at = |percent| histogram.percentile(percent).unwrap().as_nanos() as u64;
        assert_eq!((at(0.0), at(50.0), at(90.0)), (10, 10, 10));
        assert_eq!((at(90.1), at(100.0)), (largest(bucket(1000)), largest(bucket(1000))));
        assert!((1000..1125).contains(&at(99.0)));
    }
}
