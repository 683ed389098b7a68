//! What has no target of its own: the read-write gate against locks with readers, and the caches
//! against the allocator.

use std::hint::black_box;

use crossbeam_utils::sync::ShardedLock;
use harness::{Case, Group, Plan};
use parking_lot::RwLock;

use crate::report::Report;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    run_gate(plan, report);
    run_caches(plan, report);
}

fn run_gate(plan: &Plan, report: &mut Report) {
    let rw = RwLock::new(0_u64);
    let sharded = ShardedLock::new(0_u64);
    let mut group = Group::new("read-lock and unlock");
    for threads in [1, 2] {
        group = group
            .case(Case::new("ShardedLock read", threads, |_| {
                |_| {
                    black_box(&*sharded.read().expect("nobody panics with it held"));
                }
            }))
            .case(Case::new("parking_lot RwLock read", threads, |_| {
                |_| {
                    black_box(&*rw.read());
                }
            }));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
}

/// What a cached node costs the allocator: two cache lines.
type Node = [u64; 16];

fn run_caches(plan: &Plan, report: &mut Report) {
    let mut group = Group::new("take a node and give it back");
    for threads in [1, 2] {
        group = group.case(Case::new("Box new+drop", threads, |_| {
            |i| {
                black_box(Box::<Node>::new([i; 16]));
            }
        }));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
}
