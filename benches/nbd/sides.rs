//! What a round measures on each server: ours first, then its peers.
//!
//! A figure is the median over the rounds of the ratio to the better peer of that round.

use std::io;

use harness::{Ratio, Table, median, number};

use crate::servers::Server;

/// Measurements by round and server.
pub(crate) struct Sides<T> {
    /// The name in messages.
    name: String,
    servers: &'static [&'static str],
    rounds: Vec<Vec<Option<T>>>,
}

impl<T: Copy> Sides<T> {
    pub(crate) fn new(name: impl Into<String>, servers: &'static [&'static str]) -> Self {
        Self { name: name.into(), servers, rounds: Vec::new() }
    }

    /// Measures once on each server, from another one on than in the round before.
    pub(crate) fn round(
        &mut self,
        servers: &mut [Server],
        mut measure: impl FnMut(&mut Server) -> io::Result<T>,
    ) {
        let mut round = vec![None; self.servers.len()];
        for step in 0..round.len() {
            let index = (self.rounds.len() + step) % round.len();
            let name = self.servers[index];
            if let Some(server) = servers.iter_mut().find(|server| server.name == name) {
                let measured = server.check().and_then(|()| measure(server));
                let failed =
                    |error: &io::Error| println!("# failed: {} on {name}: {error}", self.name);
                round[index] = measured.inspect_err(failed).ok();
            }
        }
        self.rounds.push(round);
    }

    /// The ratios to the better of these peers: the one with more, or with less.
    pub(crate) fn ratio(
        &self,
        peers: &[&str],
        more: bool,
        of: impl Fn(&T) -> Option<f64>,
    ) -> Option<Ratio> {
        let ratio = |round: &Vec<Option<T>>| {
            let of = |at: usize| of(round[at].as_ref()?);
            let peers = (0..round.len()).filter(|at| peers.contains(&self.servers[*at]));
            let peers = peers.map(of).collect::<Option<Vec<f64>>>()?;
            let best = peers.into_iter().reduce(if more { f64::max } else { f64::min })?;
            Some(of(0)? / best)
        };
        Ratio::of(&self.rounds.iter().filter_map(ratio).collect::<Vec<_>>())
    }

    /// The median of each server.
    pub(crate) fn medians(&self, of: impl Fn(&T) -> Option<f64>) -> Vec<Option<f64>> {
        let all = |at: usize| -> Vec<f64> {
            self.rounds.iter().filter_map(|round| of(round[at].as_ref()?)).collect()
        };
        (0..self.servers.len()).map(|at| median(&all(at))).collect()
    }

    /// The medians of each server, of several figures.
    pub(crate) fn table<const N: usize>(
        &self,
        title: String,
        columns: [&str; N],
        decimals: usize,
        of: impl Fn(&T) -> [Option<f64>; N],
    ) -> Table {
        let mut table = Table::new(title, columns);
        let columns: Vec<_> = (0..N).map(|at| self.medians(|all| of(all)[at])).collect();
        for (index, name) in self.servers.iter().enumerate() {
            table.row(*name, columns.iter().map(|column| number(column[index], decimals)));
        }
        table
    }
}
