//! The rows of the table, and the target that each of them decides.

use harness::{Args, FioSide, Ratio, Rounds, median};

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
    pub(crate) target: Option<&'static str>,
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

/// All loads, the ones that decide a target first. `--quick` keeps only those.
pub(crate) fn loads(args: &Args) -> Vec<Load> {
    let random = Load {
        rw: "randread",
        block: "4k",
        depth: 32,
        connections: 1,
        cpus: 2,
        direct: false,
        light: false,
        target: None,
    };
    // N7 and N8: what a read from memory costs the server, which fio is too busy to show.
    let hits = Load { light: true, ..random };
    let sequential = Load { rw: "read", block: "128k", depth: 8, ..random };
    let mut loads = vec![
        Load { target: Some("N1"), ..random },
        Load { depth: 1, cpus: 1, target: Some("N2.samecpu.tput"), ..random },
        Load { depth: 1, target: Some("N2.twocpus.tput"), ..random },
        Load { direct: true, target: Some("N3"), ..random },
        Load { target: Some("N4"), ..sequential },
        Load { target: Some("N7"), ..hits },
        Load { connections: 8, target: Some("N8.8conn"), ..hits },
    ];
    if !args.quick {
        loads.extend([
            Load { cpus: 1, ..random },
            Load { connections: 4, ..random },
            Load { connections: 4, cpus: 1, ..random },
            Load { connections: 8, ..random },
            Load { connections: 4, depth: 1, ..random },
            Load { connections: 4, depth: 1, cpus: 1, ..random },
            Load { direct: true, cpus: 1, ..random },
            Load { cpus: 1, ..sequential },
            Load { depth: 4, ..hits },
            Load { cpus: 1, ..hits },
        ]);
    }
    loads.retain(|load| args.wants(&load.name()) || load.target.is_some_and(|id| args.wants(id)));
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
    /// The part of the reads that our server answered from its own memory.
    pub(crate) hits: Option<f64>,
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

    /// The least part of the reads of a window that our server answered from memory.
    pub(crate) fn hits(&self) -> Option<f64> {
        self.windows.iter().flatten().filter_map(|window| window.hits).min_by(f64::total_cmp)
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
            Some(id @ ("N1" | "N7" | "N8.8conn")) => {
                let part = |peer| id.to_string() + peer + ".tput";
                vec![(part(".qemu"), best(&[QEMU])), (part(".nbdkit"), best(&[NBDKIT]))]
            }
            Some("N3") => vec![("N3.qemu_native.tput".into(), best(&[DIRECT_PEER]))],
            Some("N4") => vec![("N4.sequential.tput".into(), best(&[QEMU, NBDKIT]))],
            Some(id) => vec![(id.into(), best(&[QEMU, NBDKIT]))],
            None => Vec::new(),
        }
    }
}
