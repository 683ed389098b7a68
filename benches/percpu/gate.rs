//! What has no target of its own: the read-write gate against locks with readers, and the caches
//! against the allocator.

use std::hint::black_box;

use crossbeam_utils::sync::ShardedLock;
use harness::{Case, Group, Plan};
use parking_lot::{Mutex, RwLock};
use percpu::ReadWriteGate;
use percpu::cache::{NodeCache, Preload};

use crate::report::Report;

/// Why no lock here is refused.
const FREE: &str = "no thread panics, forks, or locks twice";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    run_gate(plan, report);
    run_caches(plan, report);
}

fn run_gate(plan: &Plan, report: &mut Report) {
    let gate = ReadWriteGate::new(0_u64).expect("memory for a gate");
    let sharded = ShardedLock::new(0_u64);
    let rw = RwLock::new(0_u64);
    let std = std::sync::RwLock::new(0_u64);

    let mut group = Group::new("read-lock and unlock");
    for threads in [1, 2] {
        group = group
            .case(Case::new("ReadWriteGate read", threads, |_| {
                |_| {
                    black_box(&*gate.read().expect(FREE));
                }
            }))
            .case(Case::new("ShardedLock read", threads, |_| {
                |_| {
                    black_box(&*sharded.read().expect(FREE));
                }
            }))
            .case(Case::new("parking_lot RwLock read", threads, |_| {
                |_| {
                    black_box(&*rw.read());
                }
            }))
            .case(Case::new("std RwLock read", threads, |_| {
                |_| {
                    black_box(&*std.read().expect(FREE));
                }
            }));
    }
    let rounds = group
        .case(Case::new("ReadWriteGate write", 1, |_| {
            |_| {
                black_box(&*gate.write().expect(FREE));
            }
        }))
        .case(Case::new("ShardedLock write", 1, |_| {
            |_| {
                black_box(&*sharded.write().expect(FREE));
            }
        }))
        .case(Case::new("parking_lot RwLock write", 1, |_| {
            |_| {
                black_box(&*rw.write());
            }
        }))
        .run(plan);
    report.show(&rounds);
    let peers = ["ShardedLock read", "parking_lot RwLock read", "std RwLock read"];
    for threads in [1, 2] {
        report.against(&rounds, "ReadWriteGate read", threads, &peers);
    }
    let peers = ["ShardedLock write", "parking_lot RwLock write"];
    report.against(&rounds, "ReadWriteGate write", 1, &peers);
}

/// What a cached node costs the allocator: 512 bytes, written by whoever takes it.
type Node = Box<[u64; 64]>;

fn node() -> Node {
    Box::new([0; 64])
}

fn run_caches(plan: &Plan, report: &mut Report) {
    let freed = Mutex::new(Vec::<Node>::new());
    let nodes = NodeCache::<Node>::new(8);
    let hint = nodes.hint();
    let nodes = Mutex::new(nodes);

    // Both sides take the lock twice, once for each half: what differs is who keeps the node.
    let rounds = Group::new("take a 512-byte node, free it, around a mutex")
        .case(Case::new("NodeCache in the lock", 1, |_| {
            |_| {
                let mut preload = Preload::<Node>::new();
                preload.fill(&hint, node);
                let taken = nodes.lock().take(&mut preload).unwrap_or_else(node);
                black_box(&taken);
                let surplus = nodes.lock().put(taken, &mut preload);
                drop(surplus);
            }
        }))
        .case(Case::new("Box before and after", 1, |_| {
            |_| {
                let made = node();
                freed.lock().push(made);
                let taken = freed.lock().pop();
                black_box(&taken);
            }
        }))
        .run(plan);
    report.show(&rounds);
    report.against(&rounds, "NodeCache in the lock", 1, &["Box before and after"]);
}
