//! M7: the seed's change, in one run: the tree that frees each node, and the tree that keeps one.

use harness::{Group, Plan, Report};
use mq_rbtree::RbTree;

use crate::queue::{Queue, Tree, pair};

const CACHED: &str = "rbtree + cache";
const PLAIN: &str = "rbtree";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let builder = mq_rbtree::Queue::<u64, RbTree<u32>>::builder_with_keys(16);
    let plain: Tree = builder.spare_nodes(0).build().expect("memory for a queue");
    let cached = <Tree as Queue>::new(16);
    let rounds = Group::new("send and receive, empty queue")
        .case(pair(plain, PLAIN))
        .case(pair(cached, CACHED))
        .run(plan);
    report.show(&rounds);
    report.record("M7.cache_vs_rbtree", rounds.time_ratio(CACHED, PLAIN));
}
