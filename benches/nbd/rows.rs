//! The rows that read, and the target that each of them decides.

use std::time::Duration;

use harness::{Args, FioSide, Ratio, Table, number};

use crate::servers::{DIRECT_PEER, NBDKIT, OURS, OURS_DIRECT, QEMU};
use crate::sides::Sides;

/// One load, put on several servers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    /// The pattern, in fio's words.
    pub(crate) rw: &'static str,
    /// Bytes per request, in fio's words.
    pub(crate) block: &'static str,
    /// Requests in flight per connection.
    pub(crate) depth: usize,
    /// Connections, one fio job each.
    pub(crate) connections: usize,
    /// Server and client on one CPU each (two), or both on one.
    pub(crate) cpus: usize,
    /// The image is read past the page cache.
    pub(crate) direct: bool,
    /// Measured by [`light`](crate::light) and not by fio, with random blocks.
    pub(crate) light: bool,
    /// The target that this row decides.
    target: &'static str,
}

impl Load {
    /// The row's name, such as `randread-4k/depth32/1conn/2cpus`.
    pub(crate) fn name(&self) -> String {
        let Self { rw, block, depth, connections, cpus, direct, light, .. } = self;
        let direct = if *direct { "/direct" } else { "" };
        let light = if *light { "/light" } else { "" };
        format!("{rw}-{block}/depth{depth}/{connections}conn/{cpus}cpus{direct}{light}")
    }

    /// The servers that take this load, ours first.
    pub(crate) fn servers(&self) -> &'static [&'static str] {
        if self.direct { &[OURS_DIRECT, DIRECT_PEER] } else { &[OURS, QEMU, NBDKIT] }
    }

    /// fio's arguments, but for the server's address.
    pub(crate) fn fio_args(&self) -> [String; 4] {
        [
            format!("--rw={}", self.rw),
            format!("--bs={}", self.block),
            format!("--iodepth={}", self.depth),
            format!("--numjobs={}", self.connections),
        ]
    }

    /// The targets that this row decides.
    pub(crate) fn targets(&self, sides: &Sides<Window>) -> Vec<(String, Option<Ratio>)> {
        let best = |others: &[&str]| sides.ratio(others, true, |window| Some(window.reads.iops));
        let part = |peer: &str| format!("{}.{peer}.tput", self.target);
        match self.target {
            "N1" | "N7" | "N8.8conn" => {
                vec![(part("qemu"), best(&[QEMU])), (part("nbdkit"), best(&[NBDKIT]))]
            }
            "N3" => vec![(part("qemu_native"), best(&[DIRECT_PEER]))],
            id => vec![(id.into(), best(&[QEMU, NBDKIT]))],
        }
    }

    /// A table with one line per server.
    pub(crate) fn table(&self, sides: &Sides<Window>) -> Table {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let columns = ["IOPS", "MB/s", "p50 us", "p99 us", "server, %", "client, %", "others, %"];
        sides.table(format!("{} [{}]", self.name(), self.target), columns, 0, |window| {
            let reads = &window.reads;
            [
                reads.iops,
                reads.bytes / 1e6,
                micros(reads.p50),
                micros(reads.p99),
                window.busy * 100.0,
                reads.busy * 100.0,
                window.foreign * 100.0,
            ]
            .map(Some)
        })
    }
}

/// The loads that were asked for.
pub(crate) fn loads(args: &Args) -> Vec<Load> {
    let random = Load {
        rw: "randread",
        block: "4k",
        depth: 32,
        connections: 1,
        cpus: 2,
        direct: false,
        light: false,
        target: "N1",
    };
    // N7 and N8: what a read from memory costs the server, which fio is too busy to show.
    let light = Load { light: true, ..random };
    let mut loads = vec![
        random,
        Load { depth: 1, cpus: 1, target: "N2.samecpu.tput", ..random },
        Load { depth: 1, target: "N2.twocpus.tput", ..random },
        Load { direct: true, target: "N3", ..random },
        Load { rw: "read", block: "128k", depth: 8, target: "N4.sequential.tput", ..random },
        Load { target: "N7", ..light },
        Load { connections: 8, target: "N8.8conn", ..light },
    ];
    loads.retain(|load| args.wants(&load.name()) || args.wants(load.target));
    loads
}

/// The result of one window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) reads: FioSide,
    /// The share of other processes.
    pub(crate) foreign: f64,
    /// The part of the time that the server used its CPU.
    pub(crate) busy: f64,
}

/// One line per row: thousands of reads in a second, by server. Ours and QEMU's past the page cache stand in the
/// columns of those on it.
pub(crate) fn summary(rows: &[(Load, Sides<Window>)]) -> Table {
    let mut table =
        Table::new("thousands of reads in a second", ["offlock-nbd", "qemu-nbd", "nbdkit"]);
    (table.bars, table.scaled_by_row) = (vec![0, 1, 2], true);
    for (load, sides) in rows {
        let medians = sides.medians(|window| Some(window.reads.iops / 1e3));
        table.row(load.name(), medians.into_iter().map(|median| number(median, 1)));
    }
    table
}
