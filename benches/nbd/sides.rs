//! What a round measures on each server that has an image of its own: ours first, then its peers.
//!
//! The figure is the median over the rounds of the ratio to the better peer of that round.

use std::io;

use harness::{Ratio, Table, median, number};

use crate::servers::{NBDKIT, OURS, QEMU, Server};

/// The servers, ours first.
pub(crate) const NAMES: [&str; 3] = [OURS, QEMU, NBDKIT];

/// Measurements by round and server.
pub(crate) struct Sides<T> {
    /// The name in messages.
    name: &'static str,
    rounds: Vec<[Option<T>; 3]>,
}

impl<T: Copy> Sides<T> {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, rounds: Vec::new() }
    }

    /// Measures once on each server, from another one on than in the round before.
    pub(crate) fn round(
        &mut self,
        servers: &mut [Server],
        mut measure: impl FnMut(&mut Server) -> io::Result<T>,
    ) {
        let mut round = [None; 3];
        for step in 0..NAMES.len() {
            let index = (self.rounds.len() + step) % NAMES.len();
            if let Some(server) = servers.iter_mut().find(|server| server.name == NAMES[index]) {
                let measured = server.check().and_then(|()| measure(server));
                let failed = |error: &io::Error| {
                    println!("# failed: {} on {}: {error}", self.name, NAMES[index]);
                };
                round[index] = measured.inspect_err(failed).ok();
            }
        }
        self.rounds.push(round);
    }

    /// The ratios to the better peer: the one with more, or with less.
    pub(crate) fn ratio(&self, more: bool, of: impl Fn(&T) -> Option<f64>) -> Option<Ratio> {
        let ratio = |round: &[Option<T>; 3]| {
            let of = |at: usize| of(round[at].as_ref()?);
            let (qemu, nbdkit) = (of(1)?, of(2)?);
            Some(of(0)? / if more { qemu.max(nbdkit) } else { qemu.min(nbdkit) })
        };
        Ratio::of(&self.rounds.iter().filter_map(ratio).collect::<Vec<_>>())
    }

    /// The medians of each server.
    pub(crate) fn table<const N: usize>(
        &self,
        title: String,
        columns: [&str; N],
        decimals: usize,
        of: impl Fn(&T) -> [Option<f64>; N],
    ) -> Table {
        let mut table = Table::new(title, columns);
        for (index, name) in NAMES.iter().enumerate() {
            let measured: Vec<_> =
                self.rounds.iter().filter_map(|round| Some(of(&round[index]?))).collect();
            let column = |at: usize| measured.iter().filter_map(|all| all[at]).collect::<Vec<_>>();
            table.row(*name, (0..N).map(|at| number(median(&column(at)), decimals)));
        }
        table
    }
}
