//! M1: a message is sent and received, and the queue is empty again.

use harness::{Group, Plan, Ratio, Report, Rounds};

use crate::kernel::Kernel;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap};
use crate::queue::{Ours, Queue, Tree, pair};

/// Messages that a queue takes.
const MOST: usize = 1024;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let ours = <Ours as Queue>::new(MOST);
    let tree = <Tree as Queue>::new(MOST);
    let (kernel, pl_heap) = (Kernel::new(MOST), PlHeap::new(MOST));
    let asynchronous = AsyncPriority::new(MOST);
    let (crossbeam, kanal) = (Crossbeam::new(MOST), Kanal::new(MOST));
    let rounds = Group::new("send and receive, empty queue")
        .case(pair(&ours, Ours::NAME, 1))
        .case(pair(&tree, Tree::NAME, 1))
        .case(pair(&kernel, Kernel::NAME, 1))
        .case(pair(&pl_heap, PlHeap::NAME, 1))
        .case(pair(&asynchronous, AsyncPriority::NAME, 1))
        .case(pair(&crossbeam, Crossbeam::NAME, 1))
        .case(pair(&kanal, Kanal::NAME, 1))
        .run(plan);
    report.show(&rounds);
    let peers = [Kernel::NAME, PlHeap::NAME, AsyncPriority::NAME, Crossbeam::NAME, Kanal::NAME];
    report.against(&rounds, Ours::NAME, 1, &peers);
    report.against(&rounds, Tree::NAME, 1, &peers);
    report.record("M1.kernel", over(&rounds, Kernel::NAME));
    report.record("M1.pl_heap", over(&rounds, PlHeap::NAME));
    report.record("M1.crossbeam", over(&rounds, Crossbeam::NAME));
}

fn over(rounds: &Rounds, peer: &str) -> Option<Ratio> {
    rounds.time_ratio(&format!("{}/1", Ours::NAME), &format!("{peer}/1"))
}
