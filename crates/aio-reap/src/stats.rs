//! What the engine counts while it works.

use std::fmt;

use crate::histogram::Histogram;

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
    /// How many completions each reap found; empty reaps are not counted.
    pub reap_sizes: Sizes,
    /// How many requests the kernel took of each submission; those it took nothing of are not
    /// counted.
    pub batch_sizes: Sizes,
    /// How many requests the kernel held after each of these submissions.
    pub in_flight: Sizes,
    /// How long the kernel took, if the engine was [told to look](crate::EngineBuilder::timed):
    /// times from the call that handed a request over to the reap that found it complete. A
    /// continued transfer counts once, with its last part.
    pub latency: Option<Histogram>,
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
            reap_sizes: Sizes::up_to(depth),
            batch_sizes: Sizes::up_to(depth),
            in_flight: Sizes::up_to(depth),
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
            latency.record(now.saturating_sub(submitted));
        }
    }

    pub(crate) fn submitted(&mut self, accepted: usize, in_flight: usize) {
        self.submissions += 1;
        self.submitted += accepted as u64;
        self.max_in_flight = self.max_in_flight.max(in_flight);
        if accepted > 0 {
            self.batch_sizes.add(accepted);
            self.in_flight.add(in_flight);
        }
    }

    pub(crate) fn reaped(&mut self, found: usize) {
        if found > 0 {
            self.reap_sizes.add(found);
        }
    }

    /// Adds what another engine counted; [`max_in_flight`](Self::max_in_flight) is then the larger
    /// of the two.
    pub fn merge(&mut self, other: &Self) {
        self.accepted += other.accepted;
        self.completed += other.completed;
        self.submissions += other.submissions;
        self.submitted += other.submitted;
        self.busy += other.busy;
        self.retries += other.retries;
        self.short += other.short;
        self.waits += other.waits;
        self.stray += other.stray;
        self.max_in_flight = self.max_in_flight.max(other.max_in_flight);
        self.reap_sizes.merge(&other.reap_sizes);
        self.batch_sizes.merge(&other.batch_sizes);
        self.in_flight.merge(&other.in_flight);
        match (&mut self.latency, &other.latency) {
            (Some(sum), Some(latency)) => sum.merge(latency),
            (none, latency) => {
                if none.is_none() {
                    none.clone_from(latency);
                }
            }
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
        head(f)?;
        self.reap_sizes.row(f, "reaped at once")?;
        self.batch_sizes.row(f, "submitted at once")?;
        self.in_flight.row(f, "in flight")?;
        match &self.latency {
            Some(latency) => write!(f, "\nlatency {latency}"),
            None => Ok(()),
        }
    }
}

/// The percentiles, without a line's end.
fn head(f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "{:<22}", "percentile")?;
    PERCENTILES.iter().try_for_each(|percentile| write!(f, "{percentile:>6}"))
}

/// Histogram of small numbers: of completions reaped at once, for example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// `counts[n]` times it was `n`.
    counts: Box<[u64]>,
}

impl Sizes {
    fn up_to(most: usize) -> Self {
        Self { counts: vec![0; most + 1].into() }
    }

    #[inline]
    fn add(&mut self, size: usize) {
        let last = self.counts.len() - 1;
        self.counts[size.min(last)] += 1;
    }

    /// A line of a table below [`head`], with the line's end before it.
    fn row(&self, f: &mut fmt::Formatter<'_>, name: &str) -> fmt::Result {
        write!(f, "\n{name:<22}")?;
        PERCENTILES.iter().try_for_each(|&at| write!(f, "{:>6}", self.percentile(at)))
    }

    /// How many numbers were counted; of reaps, those that found something.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the numbers; of reaps, the completions.
    pub fn sum(&self) -> u64 {
        (0u64..).zip(&self.counts).map(|(size, count)| size * count).sum()
    }

    /// How many are at least `size`; none is larger than the engine's depth.
    pub fn at_least(&self, size: usize) -> u64 {
        self.counts.iter().skip(size).sum()
    }

    /// The smallest size that at least `percentile` per cent do not exceed; 0 without any.
    pub fn percentile(&self, percentile: f64) -> usize {
        let wanted = ((percentile / 100.0 * self.count() as f64).ceil() as u64).max(1);
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
    pub fn merge(&mut self, other: &Sizes) {
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

/// The numbers by percentile.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        head(f)?;
        self.row(f, "at once")
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
        assert_eq!((sizes.count(), sizes.sum()), (5, 3 + 256));
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
        assert_eq!((a.count(), a.percentile(100.0)), (2, 4));
    }

    #[test]
    fn engines_add_up_and_print_every_table() {
        let (mut sum, mut other) = (EngineStats::new(4), EngineStats::new(8));
        other.latency = Some(Histogram::new());
        other.submitted(8, 8);
        other.submitted(0, 8); // no room: not a batch
        other.reaped(7);
        other.took(100, 350);
        sum.submitted(2, 3);
        sum.merge(&other);
        sum.merge(&other);
        assert_eq!((sum.submissions, sum.submitted, sum.max_in_flight), (5, 18, 8));
        assert_eq!((sum.batch_sizes.count(), sum.batch_sizes.sum()), (3, 18));
        assert_eq!((sum.in_flight.sum(), sum.reap_sizes.sum()), (19, 14));
        let latency = sum.latency.as_ref().unwrap();
        assert_eq!((latency.count(), latency.mean()), (2, 250));
        let page = sum.to_string();
        let rows: Vec<_> =
            page.lines().skip(1).map(|row| row.split("  ").next().unwrap()).collect();
        assert_eq!(rows[..4], ["percentile", "reaped at once", "submitted at once", "in flight"]);
        assert!(page.ends_with("of 2 requests"), "{page}");
    }
}
