//! Histograms of the time of hits and misses, and of the hold times of locks.
//!
//! ```text
//!  ns   0 1 2 .. 15 | 16-17 .. 30-31 | 32-35 .. 60-63 | ...      8 buckets for each doubling
//! ```

use std::fmt;
use std::time::{Duration, Instant};

use percpu::sync::atomic::{AtomicU64, Ordering};

/// Each doubling has `1 << BITS` buckets, so a time is known to 1 part in 8.
const BITS: u32 = 3;
const BUCKETS: usize = (65 - BITS as usize) << BITS;

fn bucket(value: u64) -> usize {
    let shift = (u64::BITS - 1 - (value | 1).leading_zeros()).saturating_sub(BITS);
    ((shift as usize) << BITS) + (value >> shift) as usize
}

/// Returns the largest value of a bucket.
fn largest(bucket: usize) -> u64 {
    let shift = (bucket >> BITS).saturating_sub(1);
    let steps = (bucket - (shift << BITS)) as u64;
    (steps << shift) | ((1 << shift) - 1)
}

/// A histogram to which all threads add.
#[derive(Debug)]
pub(crate) struct Counts {
    buckets: Box<[AtomicU64]>,
    /// The time of reading the clock, measured once, because a third read would be a tenth of a
    /// miss.
    clock_time: Duration,
}

/// Returns the shortest time of a few reads of the clock.
fn clock_time() -> Duration {
    (0..16).map(|_| Instant::now().elapsed()).min().unwrap_or_default()
}

impl Counts {
    pub(crate) fn new() -> Self {
        // A model measures no time, and each atomic of a model costs much memory.
        let buckets = if cfg!(any(offlock_loom, offlock_shuttle)) { 0 } else { BUCKETS };
        let clock_time = if buckets > 0 { clock_time() } else { Duration::ZERO };
        Self { buckets: (0..buckets).map(|_| AtomicU64::new(0)).collect(), clock_time }
    }

    /// Adds the time since `since`, less the time of reading the clock.
    pub(crate) fn add(&self, since: Instant) {
        let time = since.elapsed().saturating_sub(self.clock_time);
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.buckets.get(bucket(nanoseconds)) {
            // Ordering: Relaxed; a statistic.
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn snapshot(&self) -> Histogram {
        // Ordering: Relaxed; a statistic, each count by itself.
        Histogram(self.buckets.iter().map(|count| count.load(Ordering::Relaxed)).collect())
    }
}

/// A histogram of times: exact below 16 ns, then to 1 part in 8. From
/// [`Cache::times`](crate::Cache::times).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram(Box<[u64]>);

impl Histogram {
    /// Returns the number of measured times.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the time that `percent` of all times do not exceed, or `None` if there are none.
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

/// The times of gets, and the hold times of locks. From [`Cache::times`](crate::Cache::times).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Times {
    /// Times of hits: one of 4,096 of each thread, which is repeated for the measurement.
    pub hits: Histogram,
    /// Times of gets that read the device or waited for a read, except those of tasks.
    pub misses: Histogram,
    /// Hold times of locks; only with [`Builder::time_locks`](crate::Builder::time_locks).
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
