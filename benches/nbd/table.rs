//! The table: every row, losses included.

use std::fmt;
use std::time::Duration;

use harness::percentile;

use crate::rows::{Row, Window};

/// A row as text: one line per server.
pub(crate) struct Lines<'a>(pub(crate) &'a Row);

/// The heading of the columns.
pub(crate) fn heading() -> String {
    format!(
        "{:<22}{:>9}{:>8}{:>10}{:>10}{:>16}{:>16}{:>9}{:>9}{:>9}",
        "",
        "IOPS",
        "MB/s",
        "p50 us",
        "p99 us",
        "offlock / this",
        "rounds",
        "server",
        "client",
        "others"
    )
}

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = self.0;
        let decides = row.load.target.map(|id| format!("  [{id}]")).unwrap_or_default();
        let hits = row.hits().map(|hits| format!("  {:.2} % hits of ours", hits * 100.0));
        writeln!(f, "{}{decides}{}", row.load.name(), hits.unwrap_or_default())?;
        let ours = row.load.ours();
        for (index, name) in row.servers.iter().enumerate() {
            let column = |value: Option<f64>, digits: usize| {
                value.map_or("none".to_string(), |value| format!("{value:.digits$}"))
            };
            let micros = |time: Duration| time.as_secs_f64() * 1e6;
            let iops = column(row.median(index, |window| window.reads.iops), 0);
            let mb = column(row.median(index, |window| window.reads.bytes / 1e6), 0);
            let p50 = column(row.median(index, |window| micros(window.reads.p50)), 1);
            let p99 = column(row.median(index, |window| micros(window.reads.p99)), 1);
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
            let percent =
                |of: fn(&Window) -> f64| column(row.median(index, of).map(|x| x * 100.0), 0) + " %";
            let (server, others) = (percent(|window| window.busy), percent(|w| w.foreign));
            let client = percent(|window| window.reads.busy);
            writeln!(
                f,
                "  {name:<20}{iops:>9}{mb:>8}{p50:>10}{p99:>10}{ratio:>16}{spread:>16}{server:>9}\
                 {client:>9}{others:>9}"
            )?;
        }
        Ok(())
    }
}
