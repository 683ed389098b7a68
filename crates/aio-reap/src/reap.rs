//! The times at which an engine looks for completions.

use std::time::{Duration, Instant};

use percpu::sync::thread;

/// The number of peeks between two reads of the clock, and between two yields of the CPU; a guess.
/// A peek costs a few nanoseconds, a read of the clock about twenty.
const PEEKS: u32 = 16;

/// The times at which an engine looks for completions, set by
/// [`EngineBuilder::reap_mode`](crate::EngineBuilder::reap_mode) and
/// [`Engine::set_reap_mode`](crate::Engine::set_reap_mode).
///
/// In every mode [`turn`](crate::Engine::turn) and [`wait`](crate::Engine::wait) reap, at most
/// [`reap_budget`](crate::EngineBuilder::reap_budget) completions at a time.
///
/// ```
/// use aio_reap::{Engine, ReapMode};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::builder().reap_mode(ReapMode::Poll).build()?;
/// engine.nop().submit()?.wait().0?;
/// engine.set_reap_mode(ReapMode::OnTurn); // submissions no longer run callbacks
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReapMode {
    /// Only in a turn or a wait. A submission only submits. It runs no callbacks, except those of
    /// requests that need no kernel or that the kernel refused.
    OnTurn,
    /// Also right after each submission. Completions that are there by then cost no wake-up.
    #[default]
    AfterSubmit,
    /// Like `AfterSubmit`, but a wait never sleeps while the kernel has a request: it peeks until
    /// there is a completion. This gives the shortest latency and occupies a CPU.
    Poll,
}

impl ReapMode {
    pub(crate) fn after_submit(self) -> bool {
        self != Self::OnTurn
    }

    /// Returns whether a wait peeks instead of sleeping.
    pub(crate) fn polls(self) -> bool {
        self == Self::Poll
    }
}

/// The peeks of one wait.
pub(crate) struct Spin {
    /// `None`: no time limit.
    end: Option<Instant>,
    peeks: u32,
}

impl Spin {
    /// Makes the peeks of a wait of `timeout`.
    pub(crate) fn new(timeout: Option<Duration>, now: impl FnOnce() -> Instant) -> Self {
        Self { end: timeout.and_then(|timeout| now().checked_add(timeout)), peeks: 0 }
    }

    /// Counts a peek. Returns false if the time is over.
    pub(crate) fn go_on(&mut self, now: impl FnOnce() -> Instant) -> bool {
        self.peeks = self.peeks.wrapping_add(1);
        if !self.peeks.is_multiple_of(PEEKS) {
            return true;
        }
        thread::yield_now(); // the thread that completes the request may need this CPU
        self.end.is_none_or(|end| now() < end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_ends_with_the_timeout() {
        let mut spin = Spin::new(Some(Duration::ZERO), Instant::now);
        assert!((0..PEEKS).any(|_| !spin.go_on(Instant::now)), "it never stops");
        // The second one is past what the clock can say.
        for timeout in [None, Some(Duration::MAX)] {
            let mut spin = Spin::new(timeout, Instant::now);
            assert!((0..10 * PEEKS).all(|_| spin.go_on(Instant::now)), "it stops at once");
        }
    }
}
