//! Interleaved rounds: every case once per round, and ratios taken inside the round.
//!
//! ```text
//! round 0   A B C        ratio A/B of round 0: two windows next to each other
//! round 1   B C A        the order rotates, so that no case always follows the same one
//! round 2   C A B        the median over the rounds is the figure
//! ```

use std::collections::BTreeSet;
use std::fmt;

use crate::stats::{Ratio, median, percentile, ratios};
use crate::table::{Table, number};

/// The cases of one comparison and the throughput that each round measured for them.
#[derive(Debug, Clone)]
pub struct Rounds {
    group: String,
    cases: Vec<Measured>,
    done: usize,
}

#[derive(Debug, Clone)]
struct Measured {
    name: String,
    threads: usize,
    /// Operations per second of all threads together, one entry per round; `None` where no window
    /// of the round counted.
    throughput: Vec<Option<f64>>,
    discarded: usize,
}

impl Rounds {
    /// An empty comparison called `group`; `cases` are names with the number of threads behind
    /// each.
    pub fn new<S: Into<String>>(
        group: impl Into<String>,
        cases: impl IntoIterator<Item = (S, usize)>,
    ) -> Self {
        let cases = cases.into_iter().map(|(name, threads)| Measured {
            name: name.into(),
            threads,
            throughput: Vec::new(),
            discarded: 0,
        });
        Self { group: group.into(), cases: cases.collect(), done: 0 }
    }

    /// Measures every case once, in this round's order. `measure` gets the index of a case and
    /// returns its operations per second, or `None` for a window that does not count: that one is
    /// counted as discarded and tried again, `retries` times at most.
    pub fn round(&mut self, retries: usize, mut measure: impl FnMut(usize) -> Option<f64>) {
        for at in 0..self.cases.len() {
            let index = (self.done + at) % self.cases.len();
            let mut value = measure(index);
            for _ in 0..retries {
                if value.is_none() {
                    self.cases[index].discarded += 1;
                    value = measure(index);
                }
            }
            self.cases[index].discarded += usize::from(value.is_none());
            self.cases[index].throughput.push(value);
        }
        self.done += 1;
    }

    /// Returns whether no window counted of a case with at most `threads` threads.
    pub fn lacks_a_case(&self, threads: usize) -> bool {
        let lacks = |case: &Measured| case.throughput.iter().all(Option::is_none);
        self.cases.iter().any(|case| case.threads <= threads && lacks(case))
    }

    /// The name of the comparison.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// The number of rounds so far.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Median operations per second of the case `name`, all its threads together.
    pub fn throughput(&self, name: &str) -> Option<f64> {
        median(&kept(&self.find(name).throughput))
    }

    /// Windows of the case `name` that did not count.
    pub fn discarded(&self, name: &str) -> usize {
        self.find(name).discarded
    }

    /// Throughput of `ours` over that of `other`: the ratio of each round. Above 1, ours is faster.
    fn tput_ratios(&self, ours: &str, other: &str) -> Vec<f64> {
        ratios(&self.find(ours).throughput, &self.find(other).throughput)
    }

    /// Throughput of `ours` over that of `other`: the median of the rounds. Above 1, ours is
    /// faster. `None` without a round in which both were measured.
    pub fn tput_ratio(&self, ours: &str, other: &str) -> Option<Ratio> {
        Ratio::of(&self.tput_ratios(ours, other))
    }

    /// Like [`tput_ratio`](Self::tput_ratio) against the best of `others`, chosen anew in each
    /// round; a round in which one of them is missing does not count.
    pub fn tput_ratio_to_best(&self, ours: &str, others: &[&str]) -> Option<Ratio> {
        let others: Vec<_> = others.iter().map(|name| &self.find(name).throughput).collect();
        let best: Vec<Option<f64>> = (0..self.done)
            .map(|round| {
                let all: Option<Vec<f64>> = others.iter().map(|other| other[round]).collect();
                all?.into_iter().reduce(f64::max)
            })
            .collect();
        Ratio::of(&ratios(&self.find(ours).throughput, &best))
    }

    /// Time per operation of `ours` over that of `other`, as a thread of each sees it: the median
    /// of the rounds. Below 1, ours is faster. `None` without a round in which both were measured.
    pub fn time_ratio(&self, ours: &str, other: &str) -> Option<Ratio> {
        let threads = self.find(ours).threads as f64 / self.find(other).threads as f64;
        Ratio::of(&self.tput_ratios(other, ours)).map(|ratio| ratio.map(|ratio| ratio * threads))
    }

    /// Returns the throughput of the case `name` on two threads over that on one.
    pub fn scale(&self, name: &str) -> Option<Ratio> {
        self.tput_ratio(&two(name), name)
    }

    /// Returns the names of the cases without the number of threads, and that number.
    pub fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.cases.iter().filter_map(|case| case.name.rsplit_once('/'))
    }

    /// Millions of operations per second by number of threads, if there are more of these than 1 and 2.
    fn by_threads(&self) -> Option<Table> {
        let of = |case: &Measured| case.name.rsplit_once('/')?.1.parse::<usize>().ok();
        let threads: BTreeSet<usize> = self.cases.iter().filter_map(of).collect();
        if threads.len() < 3 {
            return None;
        }
        let mut table = Table::new(format!("{}, Mop/s by threads", self.group), &threads);
        table.bars = (0..threads.len()).collect();
        for (name, _) in self.names() {
            if table.rows.iter().all(|(row, _)| row != name) {
                let throughput = |n: &usize| {
                    let name = format!("{name}/{n}");
                    let case = self.cases.iter().find(|case| case.name == name)?;
                    median(&kept(&case.throughput)).map(|throughput| throughput / 1e6)
                };
                table.row(name, threads.iter().map(|n| number(throughput(n), 3)));
            }
        }
        Some(table)
    }

    /// Finds a case by its name, in which `/1` may be left out.
    ///
    /// A name that is not there is a slip of the bench's author: an answer of `None` would print it
    /// as a target missed.
    fn find(&self, name: &str) -> &Measured {
        let is_called = |case: &&Measured| {
            case.name == name || case.name.strip_suffix("/1").is_some_and(|case| case == name)
        };
        let found = self.cases.iter().find(is_called);
        found.unwrap_or_else(|| panic!("group {} has no case {name}", self.group))
    }
}

/// The name of the case `name` with two threads.
pub fn two(name: &str) -> String {
    format!("{name}/2")
}

fn kept(samples: &[Option<f64>]) -> Vec<f64> {
    samples.iter().copied().flatten().collect()
}

/// A table: nanoseconds per operation with their spread over the rounds, and what was discarded.
impl fmt::Display for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = ["ns/op", "p10", "p90", "Mop/s", "rounds", "discarded"];
        let mut table = Table::new(&self.group, columns);
        for case in &self.cases {
            let kept = kept(&case.throughput);
            // The slowest tenth of the throughputs are the p90 of the times.
            let ns = |percent| {
                let throughput = percentile(&kept, 100.0 - percent);
                number(throughput.map(|each| 1e9 * case.threads as f64 / each), 2)
            };
            let mops = number(median(&kept).map(|throughput| throughput / 1e6), 3);
            let counts = [kept.len(), case.discarded].map(|count| count.to_string());
            let times = [ns(50.0), ns(10.0), ns(90.0), mops];
            table.row(&case.name, times.into_iter().chain(counts));
        }
        table.fmt(f)?;
        self.by_threads().map_or(Ok(()), |table| table.fmt(f))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> Rounds {
        Rounds::new("g", [("a", 1), ("b", 1), ("c", 2)])
    }

    /// The machine gets ten times slower round by round; the ratio stays.
    #[test]
    fn ratios_are_taken_inside_a_round() {
        let mut rounds = three();
        for speed in [1000.0, 100.0, 10.0] {
            rounds.round(0, |case| Some(speed * [3.0, 2.0, 4.0][case]));
        }
        let all =
            |figure| Some(Ratio { median: figure, least: figure, greatest: figure, rounds: 3 });
        assert_eq!(rounds.tput_ratio("a", "b"), all(1.5));
        assert_eq!(rounds.time_ratio("b", "a"), all(1.5));
        // c has two threads: twice the throughput of b, the same time per operation.
        assert_eq!(rounds.tput_ratio("c", "b"), all(2.0));
        assert_eq!(rounds.time_ratio("c", "b"), all(1.0));
        assert_eq!(rounds.throughput("a"), Some(300.0));
    }

    #[test]
    fn the_best_peer_is_chosen_round_by_round() {
        let mut rounds = three();
        for (a, b, c) in [(4.0, 1.0, 2.0), (4.0, 4.0, 2.0), (4.0, 1.0, 1.0)] {
            rounds.round(0, |case| Some([a, b, c][case]));
        }
        // 4/2, 4/4, 4/1
        let ratio = Ratio { median: 2.0, least: 1.0, greatest: 4.0, rounds: 3 };
        assert_eq!(rounds.tput_ratio_to_best("a", &["b", "c"]), Some(ratio));
    }
}
