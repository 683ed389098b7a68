//! The report on the server: the sums of the workers' counters, and the statistics of lists,
//! tables, engines and cache.
//!
//! It is displayed as a page with the tables in which the kernel's versions of these structures
//! were published. For programs see [`metrics`](crate::metrics).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use aio_reap::EngineStats;
use bufcache::CacheStats;
use offlock_percpu::rcu;
use radix_ctx::TableStats;

use crate::registry::{RegistryReport, by_name};
use crate::worker::{Inbox, Message, Shared};

/// Collects reports. Each thread that wants them has one.
#[derive(Clone)]
pub(crate) struct Reporter {
    pub(crate) workers: Vec<Inbox>,
    pub(crate) shared: Shared,
    /// How long to wait for the reports of the workers.
    pub(crate) patience: Duration,
}

impl Reporter {
    /// Asks every worker for its figures and waits for them. Leaves out workers that have ended or
    /// do not answer within the patience, so that a hanging worker does not block the caller.
    pub(crate) fn report(&self) -> ServerReport {
        let (sender, receiver) = mpsc::channel();
        for inbox in &self.workers {
            inbox.send(Message::Report(sender.clone()));
        }
        drop(sender);
        let since = Instant::now();
        let left = || self.patience.saturating_sub(since.elapsed());
        let Shared { exports, connections, registry } = &self.shared;
        let mut sum = ServerReport {
            workers: 0,
            connections: connections.stats(),
            begun: BTreeMap::new(),
            counters: Counters::default(),
            engine: None,
            waiting: 0,
            cache: exports.blocks.stats(),
            failed: exports.blocks.failed(),
            #[cfg(feature = "objects")]
            volumes: exports
                .volumes()
                .map(|(name, volume)| (name.to_owned(), volume.requests().figures()))
                .collect(),
            registry: registry.report(exports),
            rcu: rcu::stats(),
        };
        let mut begun = Vec::new();
        while let Ok(report) = receiver.recv_timeout(left()) {
            sum.workers += 1;
            sum.counters.add(&report.counters);
            sum.waiting += report.waiting;
            match &mut sum.engine {
                Some(all) => all.merge(&report.engine),
                None => sum.engine = Some(report.engine),
            }
            begun.extend(report.begun);
        }
        sum.begun = by_name(begun.into_iter());
        sum
    }
}

/// The figures of all workers and of the shared structures.
#[derive(Debug)]
pub(crate) struct ServerReport {
    pub(crate) workers: usize,
    pub(crate) connections: TableStats,
    /// Running operations of each image that has some.
    pub(crate) begun: BTreeMap<String, usize>,
    pub(crate) counters: Counters,
    pub(crate) engine: Option<EngineStats>,
    /// Requests that wait until their worker may start them.
    pub(crate) waiting: usize,
    pub(crate) cache: Option<CacheStats>,
    /// The names of the images that have failed.
    pub(crate) failed: Vec<String>,
    /// Requests to the object stores of volumes, by export.
    #[cfg(feature = "objects")]
    pub(crate) volumes: Vec<(String, [u64; 7])>,
    pub(crate) registry: RegistryReport,
    pub(crate) rcu: rcu::Stats,
}

impl ServerReport {
    /// Returns the fraction of reads that the cache answered.
    pub(crate) fn hit_rate(&self) -> f64 {
        self.counters.hits as f64 / self.counters.reads.max(1) as f64
    }
}

/// Requests and bytes of a worker since it started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    /// Reads answered from the cache.
    pub(crate) hits: u64,
    pub(crate) writes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) flushes: u64,
    pub(crate) other: u64,
    pub(crate) errors: u64,
    /// Errors that came from an image.
    pub(crate) failures: u64,
    /// Requests that ended after their connection was closed.
    pub(crate) closed: u64,
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
        self.failures += other.failures;
        self.closed += other.closed;
    }
}

impl fmt::Display for ServerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counters { reads, read_bytes, writes, written_bytes, flushes, other, errors, .. } =
            self.counters;
        let Counters { hits, closed, .. } = self.counters;
        let mib = |bytes| bytes as f64 / f64::from(1 << 20);
        writeln!(f, "server     {} workers, {} connections", self.workers, self.connections.live)?;
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
        let begun: usize = self.begun.values().sum();
        write!(f, "in flight  {begun} requests; {closed} ended after their connections")?;
        self.begun.iter().try_for_each(|(name, count)| write!(f, "; '{name}' has {count}"))?;
        self.failed.iter().try_for_each(|name| write!(f, "; '{name}' HAS FAILED: a panic"))?;
        writeln!(f, "\n  connections  {}", self.connections)?;
        writeln!(f, "waiting    {} requests", self.waiting)?;
        writeln!(f, "rcu        {}", self.rcu)?;
        match &self.engine {
            Some(engine) => writeln!(f, "engines    {engine}")?,
            None => writeln!(f, "engines    none")?,
        }
        write!(
            f,
            "crates     lists: percpu-list; contexts: radix-ctx; waiting: mq-rbtree; cache: bufcache; \
             engines: aio-reap; rcu: percpu"
        )
    }
}
