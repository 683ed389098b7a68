//! The load of a worker as other threads see it: its connections, and the time that it was busy.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// The count of connections of a worker that has stopped.
const CLOSED: usize = usize::MAX;

/// A worker's load, with cache lines of its own: the worker writes it in every round.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct WorkerLoad {
    /// Connections that the worker has, and those on their way to it.
    connections: AtomicUsize,
    /// Nanoseconds of all rounds that have ended.
    busy: AtomicU64,
    /// The worker is in a round.
    running: AtomicBool,
}

impl WorkerLoad {
    /// The connections that the worker has, and those on their way to it.
    pub(crate) fn connections(&self) -> usize {
        // Ordering: Relaxed, here and below: a connection comes and goes through the worker's
        // inbox. That none is on its way after `close` follows from the order of changes to this
        // one word.
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts a connection before it is sent to the worker. Returns `false` if the worker has
    /// stopped.
    pub(crate) fn reserve(&self) -> bool {
        let more = |count: usize| (count != CLOSED).then(|| count + 1);
        self.connections.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts a connection no more that is closed, goes to another worker, or was not sent after
    /// all.
    pub(crate) fn release(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Refuses connections from now on. Returns `false`, without effect, if the worker has one or
    /// one is on its way.
    pub(crate) fn close(&self) -> bool {
        let closed =
            self.connections.compare_exchange(0, CLOSED, Ordering::Relaxed, Ordering::Relaxed);
        closed.is_ok() || closed == Err(CLOSED)
    }

    /// Notes that a round begins. Called by the worker only.
    pub(super) fn begin_round(&self) {
        self.running.store(true, Ordering::Relaxed); // see `end_round`
    }

    /// Notes that a round has ended, which took `time`. Called by the worker only.
    pub(super) fn end_round(&self, time: Duration) {
        // Ordering: Relaxed, all: figures that other workers compare with earlier ones.
        self.running.store(false, Ordering::Relaxed);
        let before = self.busy.load(Ordering::Relaxed);
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.busy.store(before.wrapping_add(time), Ordering::Relaxed);
    }

    /// Nanoseconds of all rounds that have ended.
    pub(super) fn busy_nanos(&self) -> u64 {
        self.busy.load(Ordering::Relaxed)
    }

    /// Whether the worker is in a round. If [`busy_nanos`](Self::busy_nanos) does not change
    /// meanwhile, it may have been in the same round for long.
    pub(super) fn is_running(&self) -> bool {
        self.running.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_worker_takes_no_connection() {
        let load = WorkerLoad::default();
        assert!(load.reserve() && !load.close(), "one is on its way");
        assert!(load.reserve());
        assert_eq!(load.connections(), 2);
        load.release();
        load.release();
        assert!(load.close() && !load.reserve() && load.close());
    }
}
