//! What the engine counts while it works.

use std::fmt;

/// The percentiles by which QEMU's "linux-aio: process completions from ioq_submit()" was
/// published, and the 99th.
const PERCENTILES: [f64; 12] =
    [1.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 99.0, 99.99];

/// Counters of one engine since it started; a snapshot.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineStats {
    /// Requests taken by the engine.
    pub accepted: u64,
    /// Requests whose result was delivered (or is waiting in its operation).
    pub completed: u64,
    /// Calls that handed requests to the kernel, and how many requests they handed over.
    pub submissions: u64,
    /// Requests handed to the kernel; a continued short transfer counts again.
    pub submitted: u64,
    /// Submissions the kernel cut short for want of room (EAGAIN, EBUSY).
    pub busy: u64,
    /// EAGAIN and EINTR completions that were tried again.
    pub retries: u64,
    /// Short transfers that were continued.
    pub short: u64,
    /// Times the engine went to sleep for completions.
    pub waits: u64,
    /// Completions that named nothing in flight; anything but 0 is a bug in the backend.
    pub stray: u64,
    /// Most requests the kernel held at a time.
    pub max_in_flight: usize,
    /// How many completions each reap found.
    pub reap_sizes: ReapSizes,
    /// How long the kernel took, if the engine was [told to look](crate::EngineBuilder::timed).
    pub latency: Option<Latency>,
}

/// Times from the call that handed a request to the kernel to the reap that found it complete, in
/// nanoseconds. A continued transfer counts once, with its last part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Latency {
    /// Requests timed.
    pub count: u64,
    /// Sum of their times.
    pub total_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

impl EngineStats {
    pub(crate) fn new(depth: usize) -> Self {
        Self {
            accepted: 0,
            completed: 0,
            submissions: 0,
            submitted: 0,
            busy: 0,
            retries: 0,
            short: 0,
            waits: 0,
            stray: 0,
            max_in_flight: 0,
            reap_sizes: ReapSizes { counts: vec![0; depth + 1].into() },
            latency: None,
        }
    }

    /// Whether anybody wants to know the time.
    pub(crate) fn is_timed(&self) -> bool {
        self.latency.is_some()
    }

    /// A request handed over at `submitted` was reaped at `now`. The clock is read once per
    /// submission and once per reap.
    #[inline]
    pub(crate) fn took(&mut self, submitted: u64, now: u64) {
        if let Some(latency) = &mut self.latency {
            let time = now.saturating_sub(submitted);
            latency.count += 1;
            latency.total_ns += time;
            latency.max_ns = latency.max_ns.max(time);
        }
    }

    pub(crate) fn submitted(&mut self, accepted: usize, in_flight: usize) {
        self.submissions += 1;
        self.submitted += accepted as u64;
        self.max_in_flight = self.max_in_flight.max(in_flight);
    }

    pub(crate) fn reaped(&mut self, found: usize) {
        if found > 0 {
            let last = self.reap_sizes.counts.len() - 1;
            self.reap_sizes.counts[found.min(last)] += 1;
        }
    }
}

impl fmt::Display for EngineStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "requests {} completed {} in {} submissions ({} short, {} retried, {} busy), {} waits, \
             at most {} in flight",
            self.accepted,
            self.completed,
            self.submissions,
            self.short,
            self.retries,
            self.busy,
            self.waits,
            self.max_in_flight,
        )?;
        write!(f, "{}", self.reap_sizes)?;
        if let Some(Latency { count, total_ns, max_ns }) = self.latency {
            let mean = total_ns.checked_div(count).unwrap_or(0);
            write!(f, "\nlatency {mean} ns mean, {max_ns} ns at most, of {count} requests")?;
        }
        Ok(())
    }
}

/// Histogram of how many completions were reaped at once; empty reaps are not counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReapSizes {
    /// `counts[n]` reaps found `n` completions.
    counts: Box<[u64]>,
}

impl ReapSizes {
    /// Reaps that found something.
    pub fn reaps(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Completions reaped, over all reaps.
    pub fn completions(&self) -> u64 {
        (0u64..).zip(&self.counts).map(|(size, count)| size * count).sum()
    }

    /// Reaps that found at least `size` completions; none is found larger than the engine's depth.
    pub fn at_least(&self, size: usize) -> u64 {
        self.counts.iter().skip(size).sum()
    }

    /// The smallest size that at least `percentile` per cent of the reaps do not exceed;
    /// 0 without any reap.
    pub fn percentile(&self, percentile: f64) -> usize {
        let wanted = ((percentile / 100.0 * self.reaps() as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (size, &count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return size;
            }
        }
        0
    }

    /// Adds the counts of another engine.
    pub fn merge(&mut self, other: &ReapSizes) {
        if other.counts.len() > self.counts.len() {
            let mut longer = other.counts.clone();
            for (sum, count) in longer.iter_mut().zip(&self.counts) {
                *sum += count;
            }
            self.counts = longer;
        } else {
            for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
                *sum += count;
            }
        }
    }
}

/// Completions reaped at once, by percentile of the reaps.
impl fmt::Display for ReapSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<22}", "percentile")?;
        for percentile in PERCENTILES {
            write!(f, "{percentile:>6}")?;
        }
        write!(f, "\n{:<22}", "reaped at once")?;
        for percentile in PERCENTILES {
            write!(f, "{:>6}", self.percentile(percentile))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_count_reaps_not_completions() {
        let mut stats = EngineStats::new(128);
        assert_eq!(stats.reap_sizes.percentile(50.0), 0);
        for size in [0, 1, 1, 1, 128, 4000] {
            stats.reaped(size);
        }
        let sizes = &stats.reap_sizes;
        assert_eq!((sizes.reaps(), sizes.completions()), (5, 3 + 256));
        let picked = [1.0, 60.0, 61.0, 100.0].map(|percentile| sizes.percentile(percentile));
        assert_eq!(picked, [1, 1, 128, 128]);
        assert_eq!([0, 1, 2, 128, 129].map(|size| sizes.at_least(size)), [5, 5, 2, 2, 0]);
        assert!(sizes.to_string().lines().nth(1).unwrap().ends_with("128"));
    }

    #[test]
    fn merge_adds_whichever_is_longer() {
        let (mut short, mut long) = (EngineStats::new(1), EngineStats::new(4));
        short.reaped(1);
        long.reaped(4);
        let (mut a, mut b) = (short.reap_sizes.clone(), long.reap_sizes.clone());
        a.merge(&long.reap_sizes);
        b.merge(&short.reap_sizes);
        assert_eq!(a, b);
        assert_eq!((a.reaps(), a.percentile(100.0)), (2, 4));
    }
}
