//! The table: every row, losses included.

use std::fmt;
use std::time::Duration;

use harness::percentile;

use crate::rows::Row;

/// A row as text: one line per server.
pub(crate) struct Lines<'a>(pub(crate) &'a Row);

/// The heading of the columns.
pub(crate) fn heading() -> String {
    format!(
        "{:<22}{:>9}{:>8}{:>10}{:>10}{:>16}{:>18}{:>9}",
        "", "IOPS", "MB/s", "p50 us", "p99 us", "offlock / this", "rounds", "others"
    )
}

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = self.0;
        let decides = row.load.target.map(|id| format!("  [{id}]")).unwrap_or_default();
        writeln!(f, "{}{decides}", row.load.name())?;
        let ours = row.load.ours();
        for (index, name) in row.servers.iter().enumerate() {
            let column = |value: Option<f64>, digits: usize| {
                value.map_or("none".to_string(), |value| format!("{value:.digits$}"))
            };
            let micros = |time: Duration| time.as_secs_f64() * 1e6;
            let iops = column(row.median(index, |reads| reads.iops), 0);
            let mb = column(row.median(index, |reads| reads.bytes / 1e6), 0);
            let p50 = column(row.median(index, |reads| micros(reads.p50)), 1);
            let p99 = column(row.median(index, |reads| micros(reads.p99)), 1);
            let ratios = if *name == ours || !row.servers.contains(&ours) {
                Vec::new()
            } else {
                row.rounds.tput_ratios(ours, name)
            };
            let at = |percent| percentile(&ratios, percent);
            let ratio = at(50.0).map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
            let spread = match (at(0.0), at(100.0)) {
                (Some(low), Some(high)) => format!("{low:.2} to {high:.2}"),
                _ => String::new(),
            };
            let others = column(row.foreign(index).map(|share| share * 100.0), 0) + " %";
            writeln!(
                f,
                "  {name:<20}{iops:>9}{mb:>8}{p50:>10}{p99:>10}{ratio:>16}{spread:>18}{others:>9}"
            )?;
        }
        Ok(())
    }
}
