//! The table: every row, losses included.

use std::time::Duration;

use harness::{Table, number, percentile};

use crate::rows::{Row, Window};

/// A row as a table: one line per server.
pub(crate) fn table(row: &Row) -> Table {
    let decides = row.load.target.map(|id| format!(" [{id}]")).unwrap_or_default();
    let hits = row.hits().map(|hits| format!(", {:.2} % hits of ours", hits * 100.0));
    let title = format!("{}{decides}{}", row.load.name(), hits.unwrap_or_default());
    let columns = [
        "IOPS",
        "MB/s",
        "p50 us",
        "p99 us",
        "offlock / this",
        "rounds",
        "server, %",
        "client, %",
        "others, %",
    ];
    let mut table = Table::new(title, columns);
    let ours = row.load.ours();
    for (index, name) in row.servers.iter().enumerate() {
        let column = |of: &dyn Fn(&Window) -> f64, digits| number(row.median(index, of), digits);
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let ratios = if *name == ours || !row.servers.contains(&ours) {
            Vec::new()
        } else {
            row.rounds.tput_ratios(ours, name)
        };
        let at = |percent| percentile(&ratios, percent);
        let spread = match (at(0.0), at(100.0)) {
            (Some(low), Some(high)) => format!("{low:.2} to {high:.2}"),
            _ => String::new(),
        };
        let cells = [
            column(&|window| window.reads.iops, 0),
            column(&|window| window.reads.bytes / 1e6, 0),
            column(&|window| micros(window.reads.p50), 1),
            column(&|window| micros(window.reads.p99), 1),
            at(50.0).map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
            spread,
            column(&|window| window.busy * 100.0, 0),
            column(&|window| window.reads.busy * 100.0, 0),
            column(&|window| window.foreign * 100.0, 0),
        ];
        table.row(*name, cells);
    }
    table
}
