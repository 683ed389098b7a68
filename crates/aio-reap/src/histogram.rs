//! A histogram of times whose buckets grow with the value.
//!
//! ```text
//!  value   0 1 2 .. 63 | 64-65 66-67 .. 126-127 | 128-131 .. | ...     32 buckets for each doubling
//! ```

use std::fmt;

/// The binary logarithm of the buckets per doubling: a value is known to 1 part in 32.
const BITS: u32 = 5;
const BUCKETS: usize = (65 - BITS as usize) << BITS;

/// The number of occurrences of each time, in nanoseconds: exact up to 63, then to 1 part in 32. It
/// takes 15 KiB.
///
/// ```
/// use aio_reap::Histogram;
///
/// let mut times = Histogram::new();
/// (1..=100).for_each(|micros| times.record(micros * 1_000));
/// assert_eq!((times.count(), times.max()), (100, 100_000));
/// let median = times.percentile(50.0);
/// assert!((50_000..52_000).contains(&median)); // to 1 part in 32
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: Box<[u64]>,
    count: u64,
    total: u128,
    max: u64,
}

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

impl Histogram {
    /// Makes an empty histogram. Later calls do not allocate.
    pub fn new() -> Self {
        Self { counts: vec![0; BUCKETS].into(), count: 0, total: 0, max: 0 }
    }

    /// Adds one value.
    #[inline]
    pub fn record(&mut self, nanos: u64) {
        self.counts[bucket(nanos)] += 1;
        self.count += 1;
        self.total += u128::from(nanos);
        self.max = self.max.max(nanos);
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean, rounded down, or 0 without values.
    pub fn mean(&self) -> u64 {
        self.total.checked_div(self.count.into()).unwrap_or(0) as u64
    }

    /// Returns the largest value, exactly, or 0 without values.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns a value that at least `percentile` per cent of all values do not exceed. It is the
    /// largest value of its bucket, so up to 1 part in 32 above the exact percentile. Returns 0
    /// without values.
    pub fn percentile(&self, percentile: f64) -> u64 {
        let wanted =
            ((percentile / 100.0 * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        let found = self.counts.iter().position(|&count| {
            seen += count;
            seen >= wanted
        });
        found.map_or(0, |bucket| largest(bucket).min(self.max))
    }

    /// Adds the values of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum += count;
        }
        self.count += other.count;
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// Removes all values. Does not allocate.
    pub fn clear(&mut self) {
        self.counts.fill(0);
        (self.count, self.total, self.max) = (0, 0, 0);
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// Prints the mean, some percentiles and the largest value.
impl fmt::Display for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p99, p9999] = [50.0, 99.0, 99.99].map(|at| self.percentile(at));
        write!(
            f,
            "{} ns mean, 50 % {p50}, 99 % {p99}, 99.99 % {p9999}, {} ns at most, of {} requests",
            self.mean(),
            self.max,
            self.count,
        )
    }
}

impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Histogram({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_one_bucket_and_no_bucket_is_wider_than_it_says() {
        let around = |shift: u32| {
            let power = 1u64 << shift;
            [power.saturating_sub(1), power, power + 1, power | (power >> 1)]
        };
        for value in (0..64).flat_map(around).chain(0..5_000).chain([u64::MAX]) {
            let bucket = bucket(value);
            let most = largest(bucket);
            assert!(value <= most && most - value <= value / 32, "{value} in {bucket} to {most}");
            assert!(bucket == 0 || largest(bucket - 1) < value, "{value} in {bucket}");
        }
        assert_eq!((bucket(u64::MAX), largest(BUCKETS - 1)), (BUCKETS - 1, u64::MAX));
    }

    #[test]
    fn percentiles_count_values_and_merging_adds() {
        let (mut low, mut high) = (Histogram::new(), Histogram::new());
        assert_eq!((low.percentile(50.0), low.mean(), low.max()), (0, 0, 0));
        (1..=50).for_each(|value| low.record(value));
        (51..=100).for_each(|value| high.record(value * 1_000));
        low.merge(&high);
        assert_eq!((low.count(), low.max()), (100, 100_000));
        assert_eq!(low.mean(), ((1 + 50) * 25 + (51 + 100) * 25_000) / 100);
        let picked = [0.0, 1.0, 50.0, 100.0].map(|at| low.percentile(at));
        assert_eq!(picked, [1, 1, 50, 100_000]);
        assert!((75_000..75_000 + 75_000 / 32).contains(&low.percentile(75.0)));
        low.clear();
        assert_eq!(low, Histogram::new());
        assert_ne!(low, high);
    }
}
