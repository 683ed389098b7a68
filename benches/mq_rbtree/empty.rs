//! M1, M7 and M8: a message is sent and received, and the queue is empty again.

use std::hint::black_box;

use harness::{Case, Group, Plan, Report};
use mq_rbtree::RbTree;

use crate::kernel::KernelQueue;
use crate::peers::{AsyncPriority, Crossbeam, Kanal, PlHeap, block_on};
use crate::queue::{OPEN, Ours, Queue, Tree, pair};

/// Messages that a queue takes.
const MOST: usize = 1024;
const AWAITED: &str = "mq-rbtree bitmap, awaited";
const PEER: &str = "async-priority-channel, awaited";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let rounds = Group::new("send and receive, empty queue")
        .case(row::<Ours>())
        .case(row::<Tree>())
        .case(row::<KernelQueue>())
        .case(row::<PlHeap>())
        .case(row::<AsyncPriority>())
        .case(row::<Crossbeam>())
        .case(row::<Kanal>())
        .run(plan);
    report.compare(&rounds, &[Ours::NAME, Tree::NAME]);
    let peers =
        [("kernel", KernelQueue::NAME), ("pl_heap", PlHeap::NAME), ("crossbeam", Crossbeam::NAME)];
    for (id, peer) in peers {
        report.record(&format!("M1.{id}"), rounds.time_ratio(Ours::NAME, peer));
    }
}

fn row<'a, Q: Queue>() -> Case<'a> {
    pair(Q::new(MOST), Q::NAME)
}

/// M8: a task sends and receives, and never has to wait.
pub(crate) fn run_async(plan: &Plan, report: &mut Report) {
    let ours = <Ours as Queue>::new(MOST);
    let (sender, receiver) = async_priority_channel::bounded(MOST as u64);
    let rounds = Group::new("send and receive, one task")
        .case(row::<Ours>())
        .case(Case::batched(AWAITED, 1, |_| {
            |ops| {
                block_on(async {
                    for n in 0..ops {
                        ours.send_async(n, 0).await.expect(OPEN);
                        black_box(ours.receive_async().await.expect(OPEN));
                    }
                });
            }
        }))
        .case(Case::batched(PEER, 1, |_| {
            |ops| {
                block_on(async {
                    for n in 0..ops {
                        sender.send(n, 0_u32).await.expect(OPEN);
                        black_box(receiver.recv().await.expect(OPEN));
                    }
                });
            }
        }))
        .run(plan);
    report.compare(&rounds, &[AWAITED, Ours::NAME]);
    report.record("M8.async_vs_blocking", rounds.time_ratio(AWAITED, Ours::NAME));
}

/// M7: the seed's change: the tree that frees each node, and the tree that keeps one.
pub(crate) fn run_seed(plan: &Plan, report: &mut Report) {
    const CACHED: &str = "rbtree + cache";
    const PLAIN: &str = "rbtree";
    let builder = mq_rbtree::Queue::<u64, RbTree<u32>>::builder_with_keys(MOST);
    let plain: Tree = builder.spare_nodes(0).build().expect("memory for a queue");
    let rounds = Group::new("send and receive, empty queue")
        .case(pair(plain, PLAIN))
        .case(pair(<Tree as Queue>::new(MOST), CACHED))
        .run(plan);
    report.show(&rounds);
    report.record("M7.cache_vs_rbtree", rounds.time_ratio(CACHED, PLAIN));
}
