//! The rows: what the client does before each server, and the targets that this decides.

use std::time::Duration;

use harness::{FioMix, FioSide, Ratio, Table, number};

use self::Figure::{All, Reads, Throughput, Writes};
use crate::servers::{DIRECT_PEER, NAMES, NBDKIT, OURS_DIRECT, QEMU};
use crate::sides::Sides;

/// One load, put on several servers.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) client: Client,
    /// The operations of fio's jobs beside those that are measured.
    beside: &'static str,
    /// Server and client on one CPU each (two), or both on one.
    pub(crate) cpus: usize,
    /// The servers that take this load, ours first.
    pub(crate) servers: &'static [&'static str],
    targets: &'static [Target],
}

/// What puts a load on a server.
pub(crate) enum Client {
    /// fio, with these arguments.
    Fio(&'static str),
    /// The client that costs little: random reads over so many connections, so many in flight on each.
    Light(usize, usize),
}

/// The name of a target, the figure that it is about, and the peers whose better one ours is compared with.
type Target = (&'static str, Figure, &'static [&'static str]);

/// A figure of a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Figure {
    /// Operations per second.
    Throughput,
    /// The p99 of reads.
    Reads,
    /// The p99 of writes.
    Writes,
    /// The p99 of both.
    All,
}

impl Figure {
    fn of(self, window: &Window) -> Option<f64> {
        let p99 = |side: Option<FioSide>| Some(side?.p99?.as_secs_f64());
        match self {
            Throughput => Some(window.mix.iops()),
            Reads => p99(window.mix.reads),
            Writes => p99(window.mix.writes),
            All => p99(window.mix.all),
        }
    }
}

/// The result of one window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) mix: FioMix,
    /// The share of other processes.
    pub(crate) foreign: f64,
    /// The part of the time that the server used its CPU.
    pub(crate) busy: f64,
}

/// Rows, and what was measured for them.
pub(crate) type Measured = Vec<(&'static Row, Sides<Window>)>;

const BOTH: &[&str] = &[QEMU, NBDKIT];
const DEEP: Client = Client::Fio("--rw=randread --bs=4k --iodepth=32");
const ONE: Client = Client::Fio("--rw=randread --bs=4k --iodepth=1");

/// A row of two CPUs, without jobs beside it.
const fn row(name: &'static str, client: Client, targets: &'static [Target]) -> Row {
    Row { name, client, beside: "", cpus: 2, servers: &NAMES, targets }
}

/// The rows that read. The last two show what a read from memory costs the server, which fio is too busy to show.
pub(crate) const READS: [Row; 7] = [
    row(
        "randread-4k/depth32/1conn/2cpus",
        DEEP,
        &[("N1.qemu.tput", Throughput, &[QEMU]), ("N1.nbdkit.tput", Throughput, &[NBDKIT])],
    ),
    Row {
        cpus: 1,
        ..row("randread-4k/depth1/1conn/1cpus", ONE, &[("N2.samecpu.tput", Throughput, BOTH)])
    },
    row("randread-4k/depth1/1conn/2cpus", ONE, &[("N2.twocpus.tput", Throughput, BOTH)]),
    Row {
        servers: &[OURS_DIRECT, DIRECT_PEER],
        ..row(
            "randread-4k/depth32/1conn/2cpus/direct",
            DEEP,
            &[("N3.qemu_native.tput", Throughput, &[DIRECT_PEER])],
        )
    },
    row(
        "read-128k/depth8/1conn/2cpus",
        Client::Fio("--rw=read --bs=128k --iodepth=8"),
        &[("N4.sequential.tput", Throughput, BOTH)],
    ),
    row(
        "randread-4k/depth32/1conn/2cpus/light",
        Client::Light(1, 32),
        &[("N7.qemu.tput", Throughput, &[QEMU]), ("N7.nbdkit.tput", Throughput, &[NBDKIT])],
    ),
    row(
        "randread-4k/depth32/8conn/2cpus/light",
        Client::Light(8, 32),
        &[
            ("N8.8conn.qemu.tput", Throughput, &[QEMU]),
            ("N8.8conn.nbdkit.tput", Throughput, &[NBDKIT]),
        ],
    ),
];

/// The rows that write.
pub(crate) const WRITES: [Row; 8] = [
    row(
        "randwrite4k",
        Client::Fio("--rw=randwrite --bs=4k --iodepth=32"),
        &[("W1.randwrite4k.tput", Throughput, BOTH), ("W1.randwrite4k.p99", Writes, BOTH)],
    ),
    row(
        "randwrite4k_flush32",
        Client::Fio("--rw=randwrite --bs=4k --iodepth=32 --fsync=32"),
        &[
            ("W2.randwrite4k_flush32.tput", Throughput, BOTH),
            ("W2.randwrite4k_flush32.p99", Writes, BOTH),
        ],
    ),
    row(
        "seqwrite1M",
        Client::Fio("--rw=write --bs=1M --iodepth=4"),
        &[("W3.seqwrite1M.tput", Throughput, BOTH)],
    ),
    row(
        "randrw70_4k",
        Client::Fio("--rw=randrw --rwmixread=70 --bs=4k --iodepth=32"),
        &[("W4.randrw70_4k.tput", Throughput, BOTH), ("W4.randrw70_4k.read_p99", Reads, BOTH)],
    ),
    row(
        "randwrite64k",
        Client::Fio("--rw=randwrite --bs=64k --iodepth=16"),
        &[("W5.randwrite64k.tput", Throughput, BOTH)],
    ),
    row(
        "mixed_sizes",
        Client::Fio(
            "--rw=randrw --rwmixread=60 --bssplit=4k/60:64k/30:256k/10 --iodepth=16 \
             --unified_rw_reporting=1",
        ),
        &[("W6.mixed_sizes.tput", Throughput, BOTH), ("W6.mixed_sizes.p99", All, BOTH)],
    ),
    Row {
        beside: "--rw=randwrite --bs=1M --iodepth=1 --numjobs=8",
        ..row("read_beside_1M_writers", ONE, &[("W7.read_beside_1M_writers.p99", Reads, BOTH)])
    },
    Row {
        beside: "--rw=randtrim --bs=64k --iodepth=16",
        ..row("read_beside_trims", ONE, &[("W8.read_beside_trims.p99", Reads, BOTH)])
    },
];

impl Row {
    /// Returns whether this row, or a target of it, was asked for.
    pub(crate) fn is_wanted(&self, wants: impl Fn(&str) -> bool) -> bool {
        wants(self.name) || self.targets.iter().any(|(id, ..)| wants(id))
    }

    /// fio's arguments for a window before the server with this address.
    pub(crate) fn fio_args(&self, args: &str, uri: &str, window: Duration) -> Vec<String> {
        let mut all = format!("{args} --ioengine=nbd --uri={uri}");
        if !self.beside.is_empty() {
            // fio's options are those of the job before them: all again.
            let (runtime, beside) = (window.as_millis(), self.beside);
            all += " --name=beside --new_group --time_based --norandommap";
            all += &format!(" --runtime={runtime}ms {beside} --ioengine=nbd --uri={uri}");
        }
        all.split_whitespace().map(String::from).collect()
    }

    /// Returns the targets that this row decides.
    pub(crate) fn targets(
        &self,
        sides: &Sides<Window>,
    ) -> impl Iterator<Item = (&'static str, Option<Ratio>)> {
        self.targets.iter().map(|(id, figure, peers)| {
            let is_more = *figure == Throughput;
            (*id, sides.ratio(peers, is_more, |window| figure.of(window)))
        })
    }

    /// Returns a table with one line per server.
    pub(crate) fn table(&self, sides: &Sides<Window>) -> Table {
        let columns =
            ["reads/s", "p99 us", "writes/s", "p99 us", "server, %", "client, %", "others, %"];
        let title = format!("{} [{}]", self.name, self.targets[0].0);
        sides.table(title, columns, 0, |window| {
            let FioMix { reads, writes, all } = window.mix;
            let writes = writes.or(all);
            let iops = |side: Option<FioSide>| side.map(|side| side.iops);
            let p99 = |side: Option<FioSide>| Some(side?.p99?.as_secs_f64() * 1e6);
            let client = reads.or(writes).map(|side| side.busy * 100.0);
            let (server, others) = (Some(window.busy * 100.0), Some(window.foreign * 100.0));
            [iops(reads), p99(reads), iops(writes), p99(writes), server, client, others]
        })
    }
}

/// One line per row: thousands of reads in a second, by server. Ours and QEMU's past the page cache stand in the
/// columns of those on it.
pub(crate) fn summary(rows: &Measured) -> Table {
    let mut table =
        Table::new("thousands of reads in a second", ["offlock-nbd", "qemu-nbd", "nbdkit"]);
    (table.bars, table.scaled_by_row) = (vec![0, 1, 2], true);
    for (row, sides) in rows {
        let medians = sides.medians(|window| Some(window.mix.iops() / 1e3));
        table.row(row.name, medians.into_iter().map(|median| number(median, 1)));
    }
    table
}
