//! Threads that wait: how long, and by spins or asleep.

use std::task::{Context, Poll};
use std::time::Instant;

/// Polls on the calling thread until `poll` is ready, and sleeps in between, perhaps after spins. Returns
/// `None` at the deadline.
pub(super) fn block_on<R>(
    wait: Wait,
    spins: bool,
    poll: impl FnMut(&mut Context<'_>) -> Poll<R>,
) -> Option<R> {
    offlock_sync::block_on(poll, |woken, seen| {
        if wait.is_over() {
            return false;
        }
        if !(spins && spin_until(wait, || woken.load() != seen)) {
            let deadline = if let Wait::Until(end) = wait { Some(end) } else { None };
            woken.wait_until(seen, deadline);
        }
        true
    })
}

/// Spins until `done` returns true, and returns true then; false once the thread is to sleep, or at the
/// deadline. A yield may miss the deadline by some time slices: a thread that slept in its place would shut
/// the ring, and each sender would take the lock.
pub(super) fn spin_until(wait: Wait, mut done: impl FnMut() -> bool) -> bool {
    let ended =
        offlock_sync::spin(|| if done() { Some(true) } else { wait.is_over().then_some(false) });
    ended.unwrap_or(false)
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

    /// Returns whether the wait has a time limit.
    pub(crate) fn has_deadline(self) -> bool {
        matches!(self, Self::Past | Self::Until(_))
    }
}
