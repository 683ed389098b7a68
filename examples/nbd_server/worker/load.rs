//! What is known of a worker from outside: how many connections it has, and how busy it is.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// No connection may come any more.
const CLOSED: usize = usize::MAX;

/// A worker's load, with cache lines of its own: the worker writes it in every round.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Load {
    /// Connections that it has, and those on their way to it.
    connections: AtomicUsize,
    /// Nanoseconds that it spent on something else than waiting, up to its last wait.
    worked: AtomicU64,
    /// It does not wait now.
    working: AtomicBool,
}

impl Load {
    pub(crate) fn get(&self) -> usize {
        // Ordering: Relaxed, here and below: what comes or goes does so through the worker's inbox. That
        // none is on its way once `close` said so follows from the order of changes to this one word.
        self.connections.load(Ordering::Relaxed)
    }

    /// Announces one more, before it is sent on its way; not if the worker has stopped.
    pub(crate) fn add(&self) -> bool {
        let more = |count: usize| (count != CLOSED).then(|| count + 1);
        self.connections.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// One is closed, or goes to another worker, or has not been sent after all.
    pub(crate) fn remove(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Has none come any more, unless there is one or it is on its way.
    pub(crate) fn close(&self) -> bool {
        let closed =
            self.connections.compare_exchange(0, CLOSED, Ordering::Relaxed, Ordering::Relaxed);
        closed.is_ok() || closed == Err(CLOSED)
    }

    /// Says that the worker begins to work; only itself does.
    pub(super) fn begin(&self) {
        self.working.store(true, Ordering::Relaxed); // see `work`
    }

    /// Says that the worker has worked for so long, and is about to wait; only itself does.
    pub(super) fn work(&self, time: Duration) {
        // Ordering: Relaxed, all; figures that others compare with what they were before.
        self.working.store(false, Ordering::Relaxed);
        let before = self.worked.load(Ordering::Relaxed);
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.worked.store(before.wrapping_add(time), Ordering::Relaxed);
    }

    /// Nanoseconds that the worker has worked.
    pub(super) fn worked(&self) -> u64 {
        self.worked.load(Ordering::Relaxed)
    }

    /// Whether the worker does not wait. If it has not [`worked`](Self::worked) for long either, it may have
    /// been at the same thing for as long.
    pub(super) fn is_working(&self) -> bool {
        self.working.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_announced_to_who_has_stopped() {
        let load = Load::default();
        assert!(load.add() && !load.close(), "one is on its way");
        assert!(load.add());
        assert_eq!(load.get(), 2);
        load.remove();
        load.remove();
        assert!(load.close() && !load.add() && load.close());
    }
}
