//! What a family hands in: its table, the ratios to its peers, and the targets they decide.

use harness::{Rounds, Targets};
use percpu::Sections;

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
        match percpu::capabilities().sections {
            Sections::InUse => Self::Sections,
            _ => Self::Fallback,
        }
    }
}

/// What was measured so far.
pub(crate) struct Report {
    mode: Mode,
    /// The recorded targets.
    pub(crate) targets: Targets,
    losses: Vec<String>,
}

impl Report {
    pub(crate) fn new(mode: Mode, targets: Targets) -> Self {
        Self { mode, targets, losses: Vec::new() }
    }

    /// Prints a table.
    pub(crate) fn show(&self, rounds: &Rounds) {
        print!("{rounds}");
    }

    /// Prints how long `ours` takes over each of `peers`, and remembers where it takes longer.
    pub(crate) fn against(&mut self, rounds: &Rounds, ours: &str, peers: &[&str]) {
        for peer in peers {
            let Some(ratio) = rounds.time_ratio(ours, peer) else {
                println!("  {ours} over {peer}: none");
                continue;
            };
            println!("  {ours} over {peer}: {ratio:.3}");
            if ratio > 1.0 {
                self.losses.push(format!("{ours} takes {ratio:.2} times as long as {peer}"));
            }
        }
    }

    /// Records a target, if it is one that this process decides.
    ///
    /// # Panics
    ///
    /// Panics if `targets.toml` has no such target: a slip of this bench.
    pub(crate) fn record(&mut self, id: &str, measured: Option<f64>) {
        if id.starts_with("P8.") == (self.mode == Mode::Fallback) {
            self.targets.record(id, measured).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    /// Prints the rows in which a peer is faster.
    pub(crate) fn print_losses(&self) {
        println!("\n# rows that we lose: {}", self.losses.len());
        for loss in &self.losses {
            println!("#   {loss}");
        }
    }
}
