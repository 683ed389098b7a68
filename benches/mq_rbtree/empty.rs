//! M1: a message is sent and received, and the queue is empty again.

use harness::{Group, Plan, Report, Rounds};

use crate::kernel::Kernel;
use crate::locked::{PlHeap, PlMap, StdHeap};
use crate::peers::{AsyncPriority, Crossbeam, Flume, Kanal};
use crate::queue::{Ours, Queue, Tree, pair};

/// Messages that a queue takes.
const MOST: usize = 1024;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let ours = <Ours as Queue>::new(MOST);
    let tree = <Tree as Queue>::new(MOST);
    let (kernel, std_heap) = (Kernel::new(MOST), StdHeap::new(MOST));
    let (pl_heap, pl_map) = (PlHeap::new(MOST), PlMap::new(MOST));
    let asynchronous = AsyncPriority::new(MOST);
    let (crossbeam, kanal, flume) = (Crossbeam::new(MOST), Kanal::new(MOST), Flume::new(MOST));
    let rounds = Group::new("send and receive, empty queue")
        .case(pair(&ours, Ours::NAME, 1))
        .case(pair(&tree, Tree::NAME, 1))
        .case(pair(&kernel, Kernel::NAME, 1))
        .case(pair(&std_heap, StdHeap::NAME, 1))
        .case(pair(&pl_heap, PlHeap::NAME, 1))
        .case(pair(&pl_map, PlMap::NAME, 1))
        .case(pair(&asynchronous, AsyncPriority::NAME, 1))
        .case(pair(&crossbeam, Crossbeam::NAME, 1))
        .case(pair(&kanal, Kanal::NAME, 1))
        .case(pair(&flume, Flume::NAME, 1))
        .run(plan);
    report.show(&rounds);
    let peers = [
        Kernel::NAME,
        StdHeap::NAME,
        PlHeap::NAME,
        PlMap::NAME,
        AsyncPriority::NAME,
        Crossbeam::NAME,
        Kanal::NAME,
        Flume::NAME,
    ];
    report.against(&rounds, Ours::NAME, 1, &peers);
    report.against(&rounds, Tree::NAME, 1, &peers);
    report.record("M1.kernel", over(&rounds, Kernel::NAME));
    report.record("M1.pl_heap", over(&rounds, PlHeap::NAME));
    report.record("M1.crossbeam", over(&rounds, Crossbeam::NAME));
}

fn over(rounds: &Rounds, peer: &str) -> Option<f64> {
    rounds.time_ratio(&format!("{}/1", Ours::NAME), &format!("{peer}/1"))
}
