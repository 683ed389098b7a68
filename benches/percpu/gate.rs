//! The read-write gate against locks with readers. It has no target of its own.

use std::hint::black_box;

use crossbeam_utils::sync::ShardedLock;
use harness::{Case, Group, Plan};
use parking_lot::RwLock;
use percpu::ReadWriteGate;

use crate::report::Report;

/// Why no lock here is refused.
const FREE: &str = "no thread panics, forks, or locks twice";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
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
