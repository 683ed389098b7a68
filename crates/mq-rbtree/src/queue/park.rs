//! Threads that wait: how long, by which spins, and asleep.

use std::task::{Context, Poll};
use std::time::Instant;

use offlock_sync::atomic::{AtomicU32, Ordering};
use offlock_sync::{hint, thread};

/// Polls on the calling thread until `poll` is ready, and spins or sleeps in between. Returns `None` at the
/// deadline.
pub(super) fn block_on<R>(
    wait: Wait,
    spin: Option<&Spin>,
    poll: impl FnMut(&mut Context<'_>) -> Poll<R>,
) -> Option<R> {
    offlock_sync::block_on(poll, |woken, seen| {
        if wait.is_over() {
            return false;
        }
        if !spin.is_some_and(|spin| spin.until(wait, 1, |_| woken.load() != seen)) {
            let deadline = if let Wait::Until(end) = wait { Some(end) } else { None };
            woken.wait_until(seen, deadline);
        }
        true
    })
}

// How an operation waits.

/// How long an operation waits if it cannot complete at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Is refused at once. A sender between its claim and its publication is waited for.
    No,
    /// Does not even wait for such a sender.
    Past,
    Until(Instant),
    Forever,
}

impl Wait {
    /// Returns whether the deadline is over. In a model it always is, because a model has no time and a
    /// wait may end at any moment.
    pub(crate) fn is_over(self) -> bool {
        match self {
            Self::No | Self::Forever => false,
            Self::Past => true,
            Self::Until(end) => cfg!(offlock_model) || Instant::now() >= end,
        }
    }
}

// How long a thread spins before it sleeps.
//
// A sleep and a wake-up take tens of microseconds, so an answer that comes sooner is worth
// spinning for. A wait that ends while the thread spins doubles the spins of the next wait; any
// other halves them. Every [`PROBE_INTERVAL`] waits the full length is tried. On one CPU threads
// never spin, because the answering thread could not run.

/// The most spins, each with a pause: about 20 us on processors whose pause takes 20 to 40 ns.
const MAX_SPINS: u32 = 1_000;
/// The fewest spins, after many waits in vain.
const MIN_SPINS: u32 = 16;
/// The most yields after the spins, to threads on the same CPU, before a thread sleeps. Measured, four
/// senders and four receivers on two CPUs: 6 yields 32.5 ns for a message, 20 yields 31.
const YIELDS: u32 = 20;
/// One of so many waits spins the full length.
const PROBE_INTERVAL: u32 = 64;

/// Written by each wait, so it is on cache lines of its own.
#[repr(align(128))]
pub(crate) struct Spin {
    /// The spins of the next wait; 0 means that threads never spin.
    spins: AtomicU32,
    waits: AtomicU32,
}

impl Spin {
    pub(crate) fn new(on: bool) -> Self {
        let on = on && !cfg!(offlock_model);
        let spins = AtomicU32::new(if on { MAX_SPINS } else { 0 });
        Self { spins, waits: AtomicU32::new(0) }
    }

    /// Spins until `done` returns true, with pauses that double up to `max_pause`, then yields up to
    /// [`YIELDS`] times or until the deadline. `done` gets the number of spins so far, and `u32::MAX` after a
    /// yield. Returns whether `done` returned true.
    pub(crate) fn until(&self, wait: Wait, max_pause: u32, done: impl Fn(u32) -> bool) -> bool {
        let spins = self.spins();
        if spins == 0 {
            return false;
        }
        let (mut spun, mut pause) = (0, 1);
        let mut in_time = done(0);
        while !in_time && spun < spins {
            (0..pause).for_each(|_| hint::spin_loop());
            spun += pause;
            pause = (pause * 2).min(max_pause);
            in_time = done(spun);
        }
        self.record(in_time);
        for _ in 0..YIELDS {
            // The last yield may miss the deadline by some time slices. A thread that slept in its place
            // would shut the ring, and each sender would take the lock.
            if in_time || wait.is_over() {
                break;
            }
            thread::yield_now();
            // A wait that a yield ended is no reason to spin less: after few spins the yield is only
            // the next pause. A reset to the fewest spins made one sender and one receiver 7 % slower
            // (M4), and gained nothing for four and four (M10).
            in_time = done(u32::MAX);
        }
        in_time
    }

    /// Returns the spins of a wait that begins now.
    pub(crate) fn spins(&self) -> u32 {
        // Ordering: Relaxed, all; statistics that publish no other memory.
        let spins = self.spins.load(Ordering::Relaxed);
        if spins == 0 {
            return 0;
        }
        let waits = self.waits.fetch_add(1, Ordering::Relaxed);
        if waits.is_multiple_of(PROBE_INTERVAL) { MAX_SPINS } else { spins }
    }

    /// Records whether a wait ended while the thread spun.
    fn record(&self, in_time: bool) {
        // Ordering: Relaxed, all; statistics that publish no other memory. A lost update is
        // harmless.
        let spins = self.spins.load(Ordering::Relaxed);
        let next = if in_time { (spins * 2).min(MAX_SPINS) } else { (spins / 2).max(MIN_SPINS) };
        if spins != 0 && next != spins {
            self.spins.store(next, Ordering::Relaxed);
        }
    }
}
