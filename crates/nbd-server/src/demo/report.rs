//! The measurements of the demo, and its part of the page.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::model::Kind;

/// TRIMs in flight, in their phase, on all connections together.
pub(super) const TRIMS_AT_A_TIME: usize = 16;
/// The longest latency that a histogram distinguishes, in nanoseconds: a minute.
const LONGEST: u64 = 60_000_000_000;

/// The measurements of one connection, or all of them, in one phase.
#[derive(Clone, Debug)]
pub(super) struct Tally {
    /// Nanoseconds, per [`Kind`] in the order of [`Kind::ALL`].
    latency: Vec<Histogram<u64>>,
    read: u64,
    written: u64,
}

impl Default for Tally {
    fn default() -> Self {
        let new = || Histogram::new_with_bounds(1, LONGEST, 2).expect("constant bounds are valid");
        Self { latency: Kind::ALL.map(|_| new()).into(), read: 0, written: 0 }
    }
}

impl Tally {
    pub(super) fn count(&mut self, kind: Kind, latency: Duration, len: u32) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(LONGEST);
        self.latency[kind as usize].saturating_record(nanos);
        if kind.is_read() {
            self.read += u64::from(len);
        } else if kind.is_write() {
            self.written += u64::from(len);
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.latency.iter_mut().zip(&other.latency) {
            mine.add(theirs).expect("all histograms have the same bounds");
        }
        self.read += other.read;
        self.written += other.written;
    }

    pub(super) fn phase(&self, elapsed: Duration) -> PhaseReport {
        let requests = self.latency.iter().map(Histogram::len).sum();
        PhaseReport { requests, read: self.read, written: self.written, elapsed }
    }

    pub(super) fn kinds(&self) -> Vec<KindReport> {
        let rows = Kind::ALL.iter().zip(&self.latency).filter(|(_, latency)| !latency.is_empty());
        rows.map(|(kind, latency)| {
            let at = |quantile| Duration::from_nanos(latency.value_at_quantile(quantile));
            KindReport {
                name: kind.name(),
                count: latency.len(),
                p50: at(0.5),
                p99: at(0.99),
                max: Duration::from_nanos(latency.max()),
            }
        })
        .collect()
    }
}

/// One phase of all connections.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PhaseReport {
    pub(crate) requests: u64,
    /// Bytes read and compared.
    pub(crate) read: u64,
    pub(crate) written: u64,
    /// The time from the first request to the last reply.
    pub(crate) elapsed: Duration,
}

impl PhaseReport {
    pub(crate) fn rate(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Bytes read and written, in MiB per second.
    pub(crate) fn throughput(&self) -> f64 {
        mib(self.read + self.written) / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Latencies of one kind of request in the mixed phase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KindReport {
    pub(crate) name: &'static str,
    pub(crate) count: u64,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
}

/// The results of the demo. `Display` makes its part of the page.
#[derive(Clone, Debug, Default)]
pub(crate) struct DemoReport {
    pub(crate) size: u64,
    pub(crate) connections: usize,
    pub(crate) structured: usize,
    pub(crate) depth: usize,
    /// The image written once, in order.
    pub(crate) fill: PhaseReport,
    pub(crate) mixed: PhaseReport,
    /// The image read once, in order.
    pub(crate) verify: PhaseReport,
    /// Latencies of the mixed phase, from a request's creation to its last reply.
    pub(crate) kinds: Vec<KindReport>,
    /// TRIMs without other requests, few at a time.
    pub(crate) trims: Vec<KindReport>,
    /// Whether every byte of the image was read back and was correct.
    pub(crate) image_verified: bool,
}

impl DemoReport {
    /// Returns the number of bytes that were read and compared, in all phases.
    pub(crate) fn bytes_verified(&self) -> u64 {
        self.fill.read + self.mixed.read + self.verify.read
    }
}

impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "an image of {:.0} MiB on a Unix socket, and the built-in client has used it\n\
             over {} connections ({} with structured replies), {} requests in flight on each.\n",
            mib(self.size),
            self.connections,
            self.structured,
            self.depth
        )?;
        let random = format!("random requests for {:.0} s", self.mixed.elapsed.as_secs_f64());
        writeln!(
            f,
            "  {:<28} {:>10} {:>8} {:>12} {:>8}",
            "", "requests", "seconds", "requests/s", "MiB/s"
        )?;
        for (name, phase) in [
            ("write the whole image", self.fill),
            (random.as_str(), self.mixed),
            ("read the whole image", self.verify),
        ] {
            writeln!(
                f,
                "  {name:<28} {:>10} {:>8.1} {:>12.0} {:>8.0}",
                phase.requests,
                phase.elapsed.as_secs_f64(),
                phase.rate(),
                phase.throughput()
            )?;
        }
        writeln!(
            f,
            "\n  {:<28} {:>10} {:>8} {:>12} {:>8}",
            "latency of random requests", "requests", "p50", "p99", "max"
        )?;
        let only_trims = format!("trims alone, {TRIMS_AT_A_TIME} at a time");
        let trims = self.trims.iter().map(|kind| (&*only_trims, kind));
        for (name, kind) in self.kinds.iter().map(|kind| (kind.name, kind)).chain(trims) {
            let [p50, p99, max] = [kind.p50, kind.p99, kind.max].map(short);
            let count = kind.count;
            writeln!(f, "  {name:<28} {count:>10} {p50:>8} {p99:>12} {max:>8}")?;
        }
        writeln!(
            f,
            "  A latency includes the wait behind the other requests in flight: {} x {} of them.",
            self.connections, self.depth
        )?;
        let verdict = if self.image_verified { "every byte of the image right" } else { "NOT ALL" };
        let read = mib(self.bytes_verified());
        write!(f, "\n  verified: {read:.0} MiB were read and compared, {verdict}")
    }
}

/// Up to 10,000 us, and beyond that in ms.
fn short(time: Duration) -> String {
    match time.as_micros() {
        micros @ ..=10_000 => format!("{micros} us"),
        _ => format!("{} ms", time.as_millis()),
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
