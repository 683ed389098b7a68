//! The measurements of the demo, and how they are printed.

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
pub(crate) struct Phase {
    /// Nanoseconds from a request's creation to its last reply, per [`Kind`] in the order of [`Kind::ALL`].
    pub(super) latency: Vec<Histogram<u64>>,
    /// Bytes read and compared.
    pub(crate) read: u64,
    pub(crate) written: u64,
    /// The time from the first request to the last reply.
    pub(crate) elapsed: Duration,
}

impl Default for Phase {
    fn default() -> Self {
        let new = || Histogram::new_with_bounds(1, LONGEST, 2).expect("constant bounds are valid");
        let latency = Kind::ALL.map(|_| new()).into();
        Self { latency, read: 0, written: 0, elapsed: Duration::ZERO }
    }
}

impl Phase {
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

    fn requests(&self) -> u64 {
        self.latency.iter().map(Histogram::len).sum()
    }

    /// Requests per second.
    pub(crate) fn rate(&self) -> f64 {
        self.requests() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// The latencies of each kind of request that there were.
    pub(crate) fn kinds(&self) -> Vec<KindReport> {
        let rows = Kind::ALL.iter().zip(&self.latency).filter(|(_, latency)| !latency.is_empty());
        rows.map(|(kind, latency)| {
            let at = |quantile| Duration::from_nanos(latency.value_at_quantile(quantile));
            let (p50, p99, max) = (at(0.5), at(0.99), Duration::from_nanos(latency.max()));
            KindReport { name: kind.name(), count: latency.len(), p50, p99, max }
        })
        .collect()
    }
}

/// Latencies of one kind of request.
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
    pub(crate) fill: Phase,
    pub(crate) mixed: Phase,
    /// TRIMs without other requests, few at a time, if the server has them; and a FLUSH.
    pub(crate) trims: Phase,
    /// The image read once, in order.
    pub(crate) verify: Phase,
}

impl DemoReport {
    /// Returns whether every byte of the image was read back and was correct.
    pub(crate) fn is_verified(&self) -> bool {
        self.verify.read == self.size
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
        let head = ["", "requests", "seconds", "requests/s", "MiB/s"].map(String::from);
        row(f, &head)?;
        for (name, phase) in [
            ("write the whole image", &self.fill),
            (random.as_str(), &self.mixed),
            ("read the whole image", &self.verify),
        ] {
            let seconds = phase.elapsed.as_secs_f64();
            let (count, rate) = (phase.requests().to_string(), format!("{:.0}", phase.rate()));
            let bytes = format!("{:.0}", mib(phase.read + phase.written) / seconds.max(1e-9));
            row(f, &[name.into(), count, format!("{seconds:.1}"), rate, bytes])?;
        }
        writeln!(f)?;
        let head = ["latency of random requests", "requests", "p50", "p99", "max"];
        row(f, &head.map(String::from))?;
        let trims = self.trims.kinds().into_iter().filter(|kind| kind.name == Kind::Trim.name());
        let trims = trims.map(|kind| (format!("trims alone, {TRIMS_AT_A_TIME} at a time"), kind));
        let kinds = self.mixed.kinds().into_iter().map(|kind| (kind.name.to_string(), kind));
        for (name, kind) in kinds.chain(trims) {
            let [p50, p99, max] = [kind.p50, kind.p99, kind.max].map(short);
            row(f, &[name, kind.count.to_string(), p50, p99, max])?;
        }
        writeln!(
            f,
            "  A latency includes the wait behind the other requests in flight: {} x {} of them.",
            self.connections, self.depth
        )?;
        let verdict = if self.is_verified() { "every byte of the image right" } else { "NOT ALL" };
        let read = mib(self.fill.read + self.mixed.read + self.verify.read);
        write!(f, "\n  verified: {read:.0} MiB were read and compared, {verdict}")
    }
}

/// A row of a table: a name and four figures.
fn row(f: &mut fmt::Formatter<'_>, [name, a, b, c, d]: &[String; 5]) -> fmt::Result {
    writeln!(f, "  {name:<28} {a:>10} {b:>8} {c:>12} {d:>8}")
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
