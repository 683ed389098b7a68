//! Statistics of a list: adds, removals, and where the removals came from.

use std::fmt;
use std::ops::AddAssign;

/// The counters of a list, summed over its slots.
///
/// A *hit* is a removal on the CPU (or on a CPU of the node) to whose slot the entry was added. The numbers are
/// exact while no other thread changes the list. Otherwise they may miss changes that are under way, so two
/// calls may return fewer removals, or hits, the second time. `cpu_hits <= node_hits <= removals <= adds`
/// holds in every result. The counters have 64 bits and do not wrap.
///
/// `Display` prints the table of the Linux patch "fs: scale files_lock":
///
/// ```
/// let list = percpu_list::PerCpuList::new();
/// drop(list.insert(7)?);
/// println!("{}", list.stats());
/// // adds     removals  cpu hits  node hits
/// // 1               1  100.00 %   100.00 %
/// # assert_eq!(list.stats().removals, 1);
/// # Ok::<(), percpu_list::InsertError<i32>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Entries added.
    pub adds: u64,
    /// Entries removed, including those that a drain removed.
    pub removals: u64,
    /// Removals by a thread on a CPU of the entry's slot.
    pub cpu_hits: u64,
    /// Removals by a thread on a CPU of the same node as the entry's slot.
    pub node_hits: u64,
}

impl Stats {
    /// Returns the number of entries that were added and not removed.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.adds - self.removals
    }

    /// Returns the share of removals that were CPU hits, in percent; 100 if there were no removals.
    #[must_use]
    pub fn cpu_hit_percent(&self) -> f64 {
        self.percent(self.cpu_hits)
    }

    /// Returns the share of removals that were node hits, in percent; 100 if there were no
    /// removals.
    #[must_use]
    pub fn node_hit_percent(&self) -> f64 {
        self.percent(self.node_hits)
    }

    fn percent(&self, hits: u64) -> f64 {
        if self.removals == 0 { 100.0 } else { 100.0 * hits as f64 / self.removals as f64 }
    }
}

impl AddAssign for Stats {
    fn add_assign(&mut self, other: Self) {
        self.adds += other.adds;
        self.removals += other.removals;
        self.cpu_hits += other.cpu_hits;
        self.node_hits += other.node_hits;
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>12}  {:>12}  {:>9}  {:>9}", "adds", "removals", "cpu hits", "node hits")?;
        write!(
            f,
            "{:>12}  {:>12}  {:>7.2} %  {:>7.2} %",
            self.adds,
            self.removals,
            self.cpu_hit_percent(),
            self.node_hit_percent()
        )
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;

    const SOME: Stats = Stats { adds: 1_200, removals: 800, cpu_hits: 790, node_hits: 799 };

    #[test]
    fn without_removals_the_hits_are_100_percent() {
        let none = Stats::default();
        assert_eq!(
            (none.live(), none.cpu_hit_percent(), none.node_hit_percent()),
            (0, 100.0, 100.0)
        );
        let added = Stats { adds: 5, ..none };
        assert_eq!((added.live(), added.cpu_hit_percent()), (5, 100.0));
    }

    #[test]
    fn percentages_are_of_removals() {
        assert_eq!(SOME.live(), 400);
        assert_eq!((SOME.cpu_hit_percent(), SOME.node_hit_percent()), (98.75, 99.875));
        let missed = Stats { cpu_hits: 0, node_hits: 0, ..SOME };
        assert_eq!((missed.cpu_hit_percent(), missed.node_hit_percent()), (0.0, 0.0));
    }

    #[test]
    fn every_number_is_summed() {
        let mut sum = SOME;
        sum += Stats { adds: 1, removals: 10, cpu_hits: 100, node_hits: 1_000 };
        let expected = Stats { adds: 1_201, removals: 810, cpu_hits: 890, node_hits: 1_799 };
        assert_eq!(sum, expected);
        sum += Stats::default();
        assert_eq!(sum, expected);
    }

    #[test]
    fn the_table_has_two_lines_of_one_width() {
        let expected = "\
\x20       adds      removals   cpu hits  node hits
\x20       1200           800    98.75 %    99.88 %";
        assert_eq!(SOME.to_string(), expected);
        let widest = Stats { removals: 999_999_999_999, adds: 999_999_999_999, ..SOME };
        let text = widest.to_string();
        let widths: Vec<_> = text.lines().map(str::len).collect();
        assert_eq!(widths, [48, 48]);
    }
}
