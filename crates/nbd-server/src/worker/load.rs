//! The load of a worker, by which the main thread chooses the worker of a new connection.
//!
//! A connection stays with its worker. Two connections that become busy later may share a worker
//! while another worker is idle. Measured with two clients on two CPUs that read 4 KiB from the
//! cache, 32 at a time: with a worker each, the throughput is 2 to 3 times as high.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The time after which work counts half. Longer than most clients pause.
const HALF_LIFE: Duration = Duration::from_secs(1);
/// A worker with this much recent work is busy. A worker that works all the time has between one
/// and two [`HALF_LIFE`]s. The clients of a busy machine keep their worker waiting.
const BUSY: Duration = Duration::from_millis(250);
/// Connections that a busy worker counts in addition. More than the idle clients of a disk
/// or two, and a client that opens many connections at once still gets most workers.
const BUSY_COUNTS_AS: usize = 4;

/// The load of a worker, in a cache line of its own: the worker writes it in every round.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct WorkerLoad {
    /// Connections that the worker has, and connections sent to it.
    connections: AtomicUsize,
    /// Nanoseconds of the worker's rounds, halved at each multiple of [`HALF_LIFE`].
    work: AtomicU64,
    /// The number of halvings before the last change of `work`.
    halvings: AtomicU64,
    start: Instant,
}

impl WorkerLoad {
    /// The load of a worker without connections. All workers have the same `start`, so that their
    /// work is halved at the same times.
    pub(crate) fn new(start: Instant) -> Self {
        let (work, halvings) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { connections: AtomicUsize::new(0), work, halvings, start }
    }

    /// Returns the worker's connections, and [`BUSY_COUNTS_AS`] more if it was busy lately. A new
    /// connection goes to the worker with the least.
    pub(crate) fn get(&self) -> usize {
        let is_busy = self.work_at(self.start.elapsed()) >= BUSY.as_nanos() as u64;
        self.connections() + if is_busy { BUSY_COUNTS_AS } else { 0 }
    }

    /// Returns the worker's connections.
    pub(crate) fn connections(&self) -> usize {
        // Ordering: Relaxed, here and below. A connection is handed over by the worker's inbox.
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts a connection before it is sent to the worker.
    pub(crate) fn reserve(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Stops counting a connection that was closed, or was not sent after all.
    pub(crate) fn release(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Adds the time of a round, which began at `woke` and ends now. Called by the worker only.
    pub(super) fn end_round(&self, woke: Instant) {
        let now = Instant::now();
        self.add(now.duration_since(self.start), now.duration_since(woke));
    }

    fn add(&self, now: Duration, time: Duration) {
        let work = self.work_at(now).saturating_add(time.as_nanos() as u64);
        // Ordering: Relaxed, all. A load between the two stores finds half or twice the work, which
        // is only a hint.
        self.work.store(work, Ordering::Relaxed);
        self.halvings.store(halvings(now), Ordering::Relaxed);
    }

    fn work_at(&self, now: Duration) -> u64 {
        let past = halvings(now).saturating_sub(self.halvings.load(Ordering::Relaxed));
        self.work.load(Ordering::Relaxed) >> past.min(63)
    }
}

fn halvings(now: Duration) -> u64 {
    now.as_secs() / HALF_LIFE.as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_forgotten_by_halves() {
        let load = WorkerLoad::new(Instant::now());
        load.add(HALF_LIFE / 2, HALF_LIFE / 2);
        load.add(HALF_LIFE * 3 / 2, HALF_LIFE);
        let at = |nth: u32| load.work_at(HALF_LIFE * nth) as f64 / HALF_LIFE.as_nanos() as f64;
        assert!([1, 2, 3, 100].map(at) == [1.25, 0.625, 0.3125, 0.0]);
    }

    /// By their work in a second, and their connections.
    #[test]
    fn a_busy_worker_counts_as_one_with_more_connections() {
        let load = |milliseconds, connections| {
            let load = WorkerLoad::new(Instant::now());
            load.add(Duration::ZERO, Duration::from_millis(milliseconds));
            (0..connections).for_each(|_| load.reserve());
            load.get()
        };
        assert!(load(0, 4) < load(900, 1) && load(900, 1) < load(0, 6));
        assert!(load(900, 1) < load(300, 2) && load(200, 1) < load(0, 2));
    }
}
