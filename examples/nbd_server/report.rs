//! The page of figures: what the workers counted, added up.

use std::fmt;

use aio_reap::Sizes;
use bufcache::CacheStats;

use crate::admission::WaitStats;
use crate::registry::RegistryReport;
use crate::requests::Counters;
use crate::worker::WorkerReport;

/// All workers together.
#[derive(Debug)]
pub(crate) struct ServerReport {
    workers: usize,
    connections: usize,
    in_flight: u64,
    counters: Counters,
    submissions: u64,
    submitted: u64,
    waits: u64,
    max_in_flight: usize,
    waiting: WaitStats,
    reap_sizes: Option<Sizes>,
    cache: Option<CacheStats>,
    registry: RegistryReport,
}

impl ServerReport {
    pub(crate) fn new(
        workers: &[WorkerReport],
        connections: usize,
        cache: Option<CacheStats>,
        registry: RegistryReport,
    ) -> Self {
        let mut sum = Self {
            workers: workers.len(),
            connections,
            in_flight: 0,
            counters: Counters::default(),
            submissions: 0,
            submitted: 0,
            waits: 0,
            max_in_flight: 0,
            waiting: WaitStats::default(),
            reap_sizes: None,
            cache,
            registry,
        };
        for WorkerReport { counters, operations, engine, waits } in workers {
            sum.in_flight += operations.live;
            sum.counters.add(counters);
            sum.waiting.add(waits);
            sum.submissions += engine.submissions;
            sum.submitted += engine.submitted;
            sum.waits += engine.waits;
            sum.max_in_flight = sum.max_in_flight.max(engine.max_in_flight);
            match &mut sum.reap_sizes {
                Some(sizes) => sizes.merge(&engine.reap_sizes),
                None => sum.reap_sizes = Some(engine.reap_sizes.clone()),
            }
        }
        sum
    }
}

impl Counters {
    fn add(&mut self, other: &Counters) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.hits += other.hits;
        self.writes += other.writes;
        self.written_bytes += other.written_bytes;
        self.flushes += other.flushes;
        self.other += other.other;
        self.errors += other.errors;
        self.closed += other.closed;
        self.unknown += other.unknown;
    }
}

impl fmt::Display for ServerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counters { reads, read_bytes, writes, written_bytes, flushes, other, errors, .. } =
            self.counters;
        let Counters { hits, closed, unknown, .. } = self.counters;
        let mib = |bytes| bytes as f64 / f64::from(1 << 20);
        writeln!(f, "server     {} workers, {} connections", self.workers, self.connections)?;
        writeln!(f, "{}", self.registry)?;
        writeln!(
            f,
            "requests   {reads} reads ({:.0} MiB), {writes} writes ({:.0} MiB), {flushes} flushes, \
             {other} other, {errors} errors",
            mib(read_bytes),
            mib(written_bytes),
        )?;
        match &self.cache {
            Some(cache) => writeln!(f, "cache      {hits} of {reads} reads answered; {cache}")?,
            None => writeln!(f, "cache      none")?,
        }
        writeln!(
            f,
            "contexts   {} operations in flight; completions refused: {closed} of closed \
             connections, {unknown} of unknown ids",
            self.in_flight,
        )?;
        writeln!(
            f,
            "engines    {} requests in {} submissions ({:.1} each), at most {} in flight in one",
            self.submitted,
            self.submissions,
            self.submitted as f64 / self.submissions.max(1) as f64,
            self.max_in_flight,
        )?;
        writeln!(f, "{}", self.waiting)?;
        write!(f, "completions reaped at once, by percentile of reaps")?;
        if let Some(sizes) = &self.reap_sizes {
            write!(f, "\n{sizes}")?;
        }
        Ok(())
    }
}
