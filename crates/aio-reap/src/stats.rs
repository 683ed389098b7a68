//! The counters of an engine.

use std::fmt;

/// The percentiles of the table in QEMU's "linux-aio: process completions from ioq_submit()", and
/// the 99th.
const PERCENTILES: [f64; 12] =
    [1.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 99.0, 99.99];

/// A snapshot of the counters of one engine since its start.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let plug = engine.plug();
/// let nops = [engine.nop().submit()?, engine.nop().submit()?];
/// drop(plug);
/// for nop in nops {
///     nop.wait().0?;
/// }
/// let stats = engine.stats();
/// assert_eq!((stats.accepted, stats.completed), (2, 2));
/// println!("{stats}"); // counters, and the completions per reap by percentile
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct EngineStats {
    /// Requests that the engine accepted.
    pub accepted: u64,
    /// Requests whose result was delivered, or waits in its operation.
    pub completed: u64,
    /// Submissions to the kernel.
    pub submissions: u64,
    /// Requests that the kernel took. A continued short transfer counts again.
    pub submitted: u64,
    /// Submissions that the kernel cut short because it had no room (EAGAIN, EBUSY).
    pub busy: u64,
    /// EAGAIN and EINTR completions that were retried.
    pub retries: u64,
    /// Short transfers that were continued.
    pub short: u64,
    /// Sleeps of the engine for completions.
    pub waits: u64,
    /// Completions that matched no request in flight. Any number but 0 is a bug in the backend.
    pub stray: u64,
    /// The largest number of requests that the kernel had at a time.
    pub max_in_flight: usize,
    /// The number of completions per reap. Empty reaps do not count.
    pub reap_sizes: Sizes,
}

impl EngineStats {
    pub(crate) fn new(depth: usize) -> Self {
        Self { reap_sizes: Sizes::up_to(depth), ..Self::default() }
    }

    pub(crate) fn submitted(&mut self, accepted: usize, in_flight: usize) {
        self.submissions += 1;
        self.submitted += accepted as u64;
        self.max_in_flight = self.max_in_flight.max(in_flight);
    }

    /// Adds the counters of another engine. [`max_in_flight`](Self::max_in_flight) becomes the
    /// larger of the two.
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
        self.reap_sizes.fmt(f)
    }
}

/// A histogram of completions per reap.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let plug = engine.plug();
/// let nops: Vec<_> = (0..4).map(|_| engine.nop().submit()).collect::<Result<_, _>>()?;
/// drop(plug);
/// nops.into_iter().for_each(|nop| drop(nop.wait()));
/// let sizes = engine.stats().reap_sizes;
/// assert_eq!(sizes.sum(), 4);
/// println!("{sizes}"); // by percentile
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// `counts[n]` is the number of times that `n` was added.
    counts: Vec<u64>,
}

impl Sizes {
    fn up_to(most: usize) -> Self {
        Self { counts: vec![0; most + 1] }
    }

    #[inline]
    pub(crate) fn add(&mut self, size: usize) {
        let last = self.counts.len() - 1;
        self.counts[size.min(last)] += 1;
    }

    /// Returns how many numbers were added.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of the numbers.
    pub fn sum(&self) -> u64 {
        (0u64..).zip(&self.counts).map(|(size, count)| size * count).sum()
    }

    /// Returns how many numbers are at least `size`. None is larger than the engine's depth.
    pub fn at_least(&self, size: usize) -> u64 {
        self.counts.iter().skip(size).sum()
    }

    /// Returns the smallest number that at least `percentile` per cent of all do not exceed, or 0
    /// if there are none.
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

    /// Adds the numbers of another engine.
    pub fn merge(&mut self, other: &Sizes) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum += count;
        }
    }
}

/// Prints the numbers by percentile.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14}", "percentile")?;
        PERCENTILES.iter().try_for_each(|percentile| write!(f, "{percentile:>6}"))?;
        write!(f, "\n{:<14}", "reaped at once")?;
        PERCENTILES.iter().try_for_each(|&at| write!(f, "{:>6}", self.percentile(at)))
    }
}
