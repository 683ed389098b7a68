//! The report of a family of rows: its table, the ratios to its peers, and the targets that they decide.

use crate::rounds::Rounds;
use crate::stats::Ratio;
use crate::targets::Targets;

/// The results so far of a bench with several families of rows.
#[derive(Debug)]
pub struct Report {
    targets: Targets,
    losses: Vec<String>,
}

impl Report {
    /// Returns a report without a figure, for these targets.
    pub fn new(targets: Targets) -> Self {
        Self { targets, losses: Vec::new() }
    }

    /// Prints a table.
    pub fn show(&self, rounds: &Rounds) {
        print!("{rounds}");
    }

    /// Prints a table; how long each of `ours` takes over every other case with as many threads; and how far
    /// each case scales to two threads. Remembers where ours take longer.
    pub fn compare(&mut self, rounds: &Rounds, ours: &[&str]) {
        self.show(rounds);
        for name in ours {
            for (_, threads) in rounds.names().filter(|(other, _)| other == name) {
                let peers =
                    rounds.names().filter(|(peer, on)| *on == threads && !ours.contains(peer));
                let peers: Vec<&str> = peers.map(|(peer, _)| peer).collect();
                self.against(rounds, name, threads.parse().unwrap_or(1), &peers);
            }
        }
        for (name, _) in rounds.names().filter(|(_, threads)| *threads == "2") {
            if rounds.names().any(|(other, threads)| other == name && threads == "1") {
                let scale = rounds.scale(name).map_or(f64::NAN, |scale| scale.median);
                println!("- {name}, two threads over one: {scale:.3}");
            }
        }
    }

    /// Prints how long `ours` takes over each of `peers`, all on `threads`, and remembers where it
    /// takes longer.
    pub fn against(&mut self, rounds: &Rounds, ours: &str, threads: usize, peers: &[&str]) {
        let ours = format!("{ours}/{threads}");
        for peer in peers {
            let peer = format!("{peer}/{threads}");
            let Some(ratio) = rounds.time_ratio(&ours, &peer) else {
                println!("- {ours} over {peer}: none");
                continue;
            };
            let ratio = ratio.median;
            println!("- {ours} over {peer}: {ratio:.3}");
            if ratio > 1.0 {
                let group = rounds.group();
                self.losses.push(format!("{group}: {ours} takes {ratio:.2} times {peer}"));
            }
        }
    }

    /// Records a target.
    pub fn record(&mut self, id: &str, measured: Option<impl Into<Ratio>>) {
        self.targets.record(id, measured).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Leaves targets out: see [`Targets::leave_out`].
    pub fn leave_out(&mut self, start: &str) {
        self.targets.leave_out(start);
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
