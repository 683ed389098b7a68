//! How an operation waits.

use std::time::Instant;

use percpu::sync::Futex;

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
            Self::Until(end) => cfg!(any(offlock_loom, offlock_shuttle)) || Instant::now() >= end,
        }
    }

    /// Returns whether the wait has a time limit.
    pub(crate) fn has_deadline(self) -> bool {
        matches!(self, Self::Past | Self::Until(_))
    }
}

/// Sleeps as [`Futex::wait`] does, at most until the deadline.
pub(crate) fn sleep(futex: &Futex, seen: u32, wait: Wait) {
    match wait {
        Wait::Until(end) => futex.wait_for(seen, end.saturating_duration_since(Instant::now())),
        _ => futex.wait(seen),
    };
}
