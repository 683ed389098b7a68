//! When completions are looked for.

use std::time::{Duration, Instant};

use percpu::sync::thread;

/// Peeks between two looks at the clock, and between two offers of the CPU to other threads; a
/// guess: a peek costs a few nanoseconds, a look at the clock some twenty.
const PEEKS: u32 = 16;

/// When an engine looks for completions: [`EngineBuilder::reap_mode`](crate::EngineBuilder::reap_mode)
/// and [`Engine::set_reap_mode`](crate::Engine::set_reap_mode).
///
/// In every mode [`turn`](crate::Engine::turn) and [`wait`](crate::Engine::wait) reap, at most
/// [`reap_budget`](crate::EngineBuilder::reap_budget) completions at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReapMode {
    /// Only when the engine is turned or waited for: submitting only submits, and runs no callback
    /// but those of requests that need no kernel or were refused by it.
    OnTurn,
    /// Also right after each submission: what is complete by then costs no wake-up.
    #[default]
    AfterSubmit,
    /// As `AfterSubmit`, and a wait never sleeps while the kernel works on something: it peeks
    /// until a completion shows. The shortest latency for a whole CPU.
    Poll,
    /// As `AfterSubmit`, and a wait peeks for a while before it sleeps.
    Hybrid {
        /// How long one wait peeks at most.
        spin: Duration,
    },
}

impl ReapMode {
    pub(crate) fn after_submit(self) -> bool {
        self != Self::OnTurn
    }

    /// Whether a wait peeks before it sleeps.
    pub(crate) fn peeks(self) -> bool {
        matches!(self, Self::Poll | Self::Hybrid { .. })
    }

    /// How long a wait of `timeout` peeks before it sleeps.
    pub(crate) fn spin(
        self,
        timeout: Option<Duration>,
        now: impl FnOnce() -> Instant,
    ) -> Option<Spin> {
        let budget = match self {
            Self::OnTurn | Self::AfterSubmit => return None,
            Self::Poll => timeout,
            Self::Hybrid { spin } => Some(timeout.map_or(spin, |timeout| timeout.min(spin))),
        };
        let end = budget.map(|budget| now().checked_add(budget));
        Some(Spin { end: end.flatten(), peeks: 0 })
    }
}

/// One wait's peeks.
pub(crate) struct Spin {
    /// `None`: as long as it takes.
    end: Option<Instant>,
    peeks: u32,
}

impl Spin {
    /// To be called between two peeks; false when it is time to stop.
    pub(crate) fn go_on(&mut self, now: impl FnOnce() -> Instant) -> bool {
        self.peeks = self.peeks.wrapping_add(1);
        if !self.peeks.is_multiple_of(PEEKS) {
            return true;
        }
        thread::yield_now(); // whoever completes the request may need this CPU
        self.end.is_none_or(|end| now() < end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_ends_with_the_shorter_of_budget_and_timeout() {
        let hybrid = ReapMode::Hybrid { spin: Duration::from_secs(3600) };
        let none = Some(Duration::ZERO);
        for (mode, timeout) in [
            (ReapMode::Poll, none),
            (hybrid, none),
            (ReapMode::Hybrid { spin: Duration::ZERO }, None),
        ] {
            let mut spin = mode.spin(timeout, Instant::now).unwrap();
            assert!((0..PEEKS).any(|_| !spin.go_on(Instant::now)), "{mode:?} never stops");
        }
        for (mode, timeout) in [
            (ReapMode::Poll, None),
            (hybrid, None),
            (ReapMode::Poll, Some(Duration::MAX)), // past what the clock can say
        ] {
            let mut spin = mode.spin(timeout, Instant::now).unwrap();
            assert!((0..10 * PEEKS).all(|_| spin.go_on(Instant::now)), "{mode:?} stops at once");
        }
        assert!(ReapMode::AfterSubmit.spin(None, Instant::now).is_none());
    }
}
