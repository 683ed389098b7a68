//! The figures of the server, for the page of the metrics: the sums of the workers' counters, and
//! the statistics of the engines and the cache.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use aio_reap::EngineStats;
use bufcache::CacheStats;

use crate::registry::by_name;
use crate::requests::Counters;
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
            connections: connections.stats().live,
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
            open: registry.by_export(exports),
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
    pub(crate) connections: u64,
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
    /// The number of connections of each export: those of the command line, and others that are open.
    pub(crate) open: BTreeMap<String, usize>,
}

impl ServerReport {
    /// Returns the fraction of reads that the cache answered.
    pub(crate) fn hit_rate(&self) -> f64 {
        self.counters.hits as f64 / self.counters.reads.max(1) as f64
    }
}
