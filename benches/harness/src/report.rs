//! What a family of rows hands in: its table, the ratios to its peers, and the targets they decide.

use std::path::PathBuf;

use crate::chapter::Chapter;
use crate::rounds::Rounds;
use crate::targets::{Measured, TargetError, Targets};

/// What a bench with several families of rows has measured so far.
#[derive(Debug)]
pub struct Report {
    targets: Targets,
    losses: Vec<String>,
    hand_on: Option<PathBuf>,
}

impl Report {
    /// Nothing yet, for these targets. Chapters are appended to the file as well.
    pub fn new(targets: Targets, hand_on: Option<PathBuf>) -> Self {
        Self { targets, losses: Vec::new(), hand_on }
    }

    /// Prints a chapter, and hands it on.
    ///
    /// # Panics
    ///
    /// Panics if the file cannot be written that it is to be handed on in.
    pub fn chapter(&self, chapter: &Chapter) {
        print!("{chapter}");
        if let Some(file) = &self.hand_on {
            let handed = chapter.append_to(file);
            handed.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }

    /// Prints a table.
    pub fn show(&self, rounds: &Rounds) {
        print!("{rounds}");
    }

    /// Prints how long `ours` takes over each of `peers`, all on `threads`, and remembers where it
    /// takes longer.
    pub fn against(&mut self, rounds: &Rounds, ours: &str, threads: usize, peers: &[&str]) {
        let ours = format!("{ours}/{threads}");
        for peer in peers {
            let peer = format!("{peer}/{threads}");
            let Some(ratio) = rounds.time_ratio(&ours, &peer) else {
                println!("  {ours} over {peer}: none");
                continue;
            };
            let ratio = ratio.median;
            println!("  {ours} over {peer}: {ratio:.3}");
            if ratio > 1.0 {
                let group = rounds.group();
                self.losses.push(format!("{group}: {ours} takes {ratio:.2} times {peer}"));
            }
        }
    }

    /// Records a target.
    ///
    /// # Panics
    ///
    /// Panics if `targets.toml` has no such target: a slip of this bench.
    pub fn record(&mut self, id: &str, measured: impl Into<Measured>) {
        self.targets.record(id, measured).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Records what another run of the bench has printed: see [`Targets::record_line`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn record_line(&mut self, line: &str) -> Result<bool, TargetError> {
        self.targets.record_line(line)
    }

    /// Prints the rows in which a peer is faster, and the targets.
    pub fn print(&self) {
        println!("\n# rows that we lose: {}", self.losses.len());
        for loss in &self.losses {
            println!("#   {loss}");
        }
        print!("\n{}", self.targets);
    }
}
