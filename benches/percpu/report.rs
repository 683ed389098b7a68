//! The report of the harness, for targets of which a process decides one half.

use harness::{Measured, Rounds, Targets};

/// Which half of the targets this process decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// With rseq sections: P1 to P7.
    Sections,
    /// Without: P8.
    Fallback,
}

impl Mode {
    /// As `percpu` tells it.
    pub(crate) fn of_this_process() -> Self {
        match offlock_percpu::capabilities().sections {
            Ok(()) => Self::Sections,
            Err(_) => Self::Fallback,
        }
    }
}

/// What was measured so far.
pub(crate) struct Report {
    mode: Mode,
    pub(crate) all: harness::Report,
}

impl Report {
    pub(crate) fn new(mode: Mode, targets: Targets) -> Self {
        Self { mode, all: harness::Report::new(targets) }
    }

    /// Prints a table.
    pub(crate) fn show(&self, rounds: &Rounds) {
        self.all.show(rounds);
    }

    /// Prints how long `ours` takes over each of `peers`, all on `threads`, and remembers where it
    /// takes longer.
    pub(crate) fn against(&mut self, rounds: &Rounds, ours: &str, threads: usize, peers: &[&str]) {
        self.all.against(rounds, ours, threads, peers);
    }

    /// Records a target, if it is one that this process decides.
    ///
    /// # Panics
    ///
    /// Panics if `targets.toml` has no such target: a slip of this bench.
    pub(crate) fn record(&mut self, id: &str, measured: impl Into<Measured>) {
        if id.starts_with("P8.") == (self.mode == Mode::Fallback) {
            self.all.record(id, measured);
        }
    }
}
