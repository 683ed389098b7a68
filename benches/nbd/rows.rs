//! What is measured: the rows of the table, and which target each of them decides.

use harness::{Args, FioReads, Rounds, median};

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
    /// The target that this row decides.
    pub(crate) target: Option<&'static str>,
}

impl Load {
    /// The row's name, such as `randread-4k/depth32/1conn/2cpus`.
    pub(crate) fn name(&self) -> String {
        let Self { rw, block, depth, connections, cpus, direct, .. } = self;
        let direct = if *direct { "/direct" } else { "" };
        format!("{rw}-{block}/depth{depth}/{connections}conn/{cpus}cpus{direct}")
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
        target: None,
    };
    let sequential = Load { rw: "read", block: "128k", depth: 8, ..random };
    let mut loads = vec![
        Load { target: Some("N1"), ..random },
        Load { depth: 1, cpus: 1, target: Some("N2.samecpu.tput"), ..random },
        Load { depth: 1, target: Some("N2.twocpus.tput"), ..random },
        Load { direct: true, target: Some("N3"), ..random },
        Load { target: Some("N4"), ..sequential },
    ];
    if !args.quick {
        loads.extend([
            Load { cpus: 1, ..random },
            Load { connections: 4, ..random },
            Load { connections: 4, cpus: 1, ..random },
            Load { connections: 4, depth: 1, ..random },
            Load { connections: 4, depth: 1, cpus: 1, ..random },
            Load { direct: true, cpus: 1, ..random },
            Load { cpus: 1, ..sequential },
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
    reads: Vec<Vec<FioReads>>,
    /// Per server, the share of other processes in those windows.
    foreign: Vec<Vec<f64>>,
}

impl Row {
    /// A row for the servers that run and can take the load.
    pub(crate) fn new(load: Load, running: &[&'static str]) -> Self {
        let servers: Vec<_> =
            load.servers().iter().copied().filter(|name| running.contains(name)).collect();
        let cases = servers.iter().map(|name| (*name, 1));
        let rounds = Rounds::new(load.name(), cases);
        let (reads, foreign) = (vec![Vec::new(); servers.len()], vec![Vec::new(); servers.len()]);
        Self { load, servers, rounds, reads, foreign }
    }

    /// One round: `window` measures the load on a server, and says what share went to others.
    pub(crate) fn round(
        &mut self,
        mut window: impl FnMut(&Load, &'static str) -> Option<(FioReads, f64)>,
    ) {
        let Self { load, servers, rounds, reads, foreign } = self;
        rounds.round(0, |index| {
            let (measured, share) = window(load, servers[index])?;
            reads[index].push(measured);
            foreign[index].push(share);
            Some(measured.iops)
        });
    }

    /// The median over the windows of a server.
    pub(crate) fn median(&self, server: usize, of: impl Fn(&FioReads) -> f64) -> Option<f64> {
        median(&self.reads[server].iter().map(of).collect::<Vec<_>>())
    }

    /// The median share of other processes in the windows of a server.
    pub(crate) fn foreign(&self, server: usize) -> Option<f64> {
        median(&self.foreign[server])
    }

    /// The targets that this row decides, as far as both sides of them were measured.
    pub(crate) fn targets(&self) -> Vec<(&'static str, Option<f64>)> {
        let ours = self.load.ours();
        let all_run = |others: &[&str]| {
            self.servers.contains(&ours) && others.iter().all(|name| self.servers.contains(name))
        };
        let best = |others: &[&str]| {
            all_run(others).then(|| self.rounds.tput_ratio_to_best(ours, others)).flatten()
        };
        match self.load.target {
            Some("N1") => {
                vec![("N1.qemu.tput", best(&[QEMU])), ("N1.nbdkit.tput", best(&[NBDKIT]))]
            }
            Some("N3") => vec![("N3.qemu_native.tput", best(&[DIRECT_PEER]))],
            Some("N4") => vec![("N4.sequential.tput", best(&[QEMU, NBDKIT]))],
            Some(id) => vec![(id, best(&[QEMU, NBDKIT]))],
            None => Vec::new(),
        }
    }
}
