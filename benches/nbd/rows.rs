//! The rows of the table, and the target that each of them decides.

use std::time::Duration;

use harness::{Args, FioSide, Ratio, Rounds, Table, median, number};

use crate::servers::{DIRECT_PEER, NBDKIT, OURS, OURS_DIRECT, QEMU};

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

    /// The servers that can take this load.
    fn servers(&self) -> &'static [&'static str] {
        if self.direct { &[OURS_DIRECT, DIRECT_PEER] } else { &[OURS, QEMU, NBDKIT] }
    }

    /// The server that the others are compared with.
    pub(crate) fn ours(&self) -> &'static str {
        self.servers()[0]
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
        Load { rw: "read", block: "128k", depth: 8, target: "N4", ..random },
        Load { target: "N7", ..light },
        Load { connections: 8, target: "N8.8conn", ..light },
    ];
    loads.retain(|load| args.wants(&load.name()) || args.wants(load.target));
    loads
}

/// A load and what its windows have shown so far.
pub(crate) struct Row {
    pub(crate) load: Load,
    pub(crate) servers: Vec<&'static str>,
    /// The throughput of a server is its IOPS.
    pub(crate) rounds: Rounds,
    /// Per server, every window that counted.
    windows: Vec<Vec<Window>>,
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

impl Row {
    /// A row for the servers that run and can take the load.
    pub(crate) fn new(load: Load, running: &[&'static str]) -> Self {
        let servers: Vec<_> =
            load.servers().iter().copied().filter(|name| running.contains(name)).collect();
        let cases = servers.iter().map(|name| (*name, 1));
        let rounds = Rounds::new(load.name(), cases);
        let windows = vec![Vec::new(); servers.len()];
        Self { load, servers, rounds, windows }
    }

    /// One round: `window` measures the load on a server.
    pub(crate) fn round(&mut self, mut window: impl FnMut(&Load, &'static str) -> Option<Window>) {
        let Self { load, servers, rounds, windows } = self;
        rounds.round(0, |index| {
            let window = window(load, servers[index])?;
            windows[index].push(window);
            Some(window.reads.iops)
        });
    }

    /// The median over the windows of a server.
    pub(crate) fn median(&self, server: usize, of: impl Fn(&Window) -> f64) -> Option<f64> {
        median(&self.windows[server].iter().map(of).collect::<Vec<_>>())
    }

    /// Returns whether every server that can take the load runs.
    pub(crate) fn lacks_no_server(&self) -> bool {
        self.servers.len() == self.load.servers().len()
    }

    /// The targets that this row decides, as far as both sides of them were measured.
    pub(crate) fn targets(&self) -> Vec<(String, Option<Ratio>)> {
        let ours = self.load.ours();
        let all_run = |others: &[&str]| {
            self.servers.contains(&ours) && others.iter().all(|name| self.servers.contains(name))
        };
        let best = |others: &[&str]| {
            all_run(others).then(|| self.rounds.tput_ratio_to_best(ours, others)).flatten()
        };
        match self.load.target {
            id @ ("N1" | "N7" | "N8.8conn") => {
                let part = |peer| id.to_string() + peer + ".tput";
                vec![(part(".qemu"), best(&[QEMU])), (part(".nbdkit"), best(&[NBDKIT]))]
            }
            "N3" => vec![("N3.qemu_native.tput".into(), best(&[DIRECT_PEER]))],
            "N4" => vec![("N4.sequential.tput".into(), best(&[QEMU, NBDKIT]))],
            id => vec![(id.into(), best(&[QEMU, NBDKIT]))],
        }
    }

    /// A table with one line per server.
    pub(crate) fn table(&self) -> Table {
        let columns = [
            "IOPS",
            "MB/s",
            "p50 us",
            "p99 us",
            "offlock / this",
            "server, %",
            "client, %",
            "others, %",
        ];
        let mut table = Table::new(format!("{} [{}]", self.load.name(), self.load.target), columns);
        let ours = self.load.ours();
        for (index, name) in self.servers.iter().enumerate() {
            let column =
                |of: &dyn Fn(&Window) -> f64, digits| number(self.median(index, of), digits);
            let micros = |time: Duration| time.as_secs_f64() * 1e6;
            let has_both = *name != ours && self.servers.contains(&ours);
            let ratio = has_both.then(|| self.rounds.tput_ratio(ours, name)).flatten();
            let cells = [
                column(&|window| window.reads.iops, 0),
                column(&|window| window.reads.bytes / 1e6, 0),
                column(&|window| micros(window.reads.p50), 1),
                column(&|window| micros(window.reads.p99), 1),
                ratio.map_or(String::new(), |ratio| format!("{:.2}", ratio.median)),
                column(&|window| window.busy * 100.0, 0),
                column(&|window| window.reads.busy * 100.0, 0),
                column(&|window| window.foreign * 100.0, 0),
            ];
            table.row(*name, cells);
        }
        table
    }
}
