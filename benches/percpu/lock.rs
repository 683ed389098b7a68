//! P4: the local-global lock against locks that one thread at a time holds.
//!
//! No thread waits in a row with one thread. In rows with two, the peers' threads contend for their
//! one lock, and ours each lock the slot of their own CPU, which is the purpose of the lock.

use std::hint::black_box;
use std::sync::Mutex as StdMutex;

use crossbeam_utils::sync::ShardedLock;
use harness::{Case, Group, Plan, Report};
use offlock_percpu::lglock::LgLock;
use parking_lot::Mutex;

/// The message of `expect`: no lock is refused.
const FREE: &str = "no thread panics or locks twice";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let plain = LgLock::new(|_| 0_u64);
    let parking_lot = Mutex::new(0_u64);
    let std = StdMutex::new(0_u64);
    let spin = spin::Mutex::<u64>::new(0);
    let sharded = ShardedLock::new(0_u64);

    let mut group = Group::new("lock and unlock");
    for threads in [1, 2] {
        group = group
            .case(Case::new("LgLock local", threads, |_| {
                |_| {
                    black_box(&*plain.local().expect(FREE));
                }
            }))
            .case(Case::new("parking_lot Mutex", threads, |_| {
                |_| {
                    black_box(&*parking_lot.lock());
                }
            }))
            .case(Case::new("std Mutex", threads, |_| {
                |_| {
                    black_box(&*std.lock().expect(FREE));
                }
            }))
            .case(Case::new("spin Mutex", threads, |_| {
                |_| {
                    black_box(&*spin.lock());
                }
            }))
            .case(Case::new("ShardedLock read", threads, |_| {
                |_| {
                    black_box(&*sharded.read().expect(FREE));
                }
            }));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
    let peers = ["parking_lot Mutex", "std Mutex", "spin Mutex", "ShardedLock read"];
    for threads in [1, 2] {
        report.against(&rounds, "LgLock local", threads, &peers);
    }

    let plain = "LgLock local/1";
    report.record("P4.plain.parking_lot", rounds.time_ratio(plain, "parking_lot Mutex/1"));
    report.record("P4.plain.sharded_lock", rounds.time_ratio(plain, "ShardedLock read/1"));
    report.record("P4.plain.scale", rounds.tput_ratio("LgLock local/2", plain));
}

/// All slots at once, on one thread.
pub(crate) fn run_global(plan: &Plan, report: &mut Report) {
    let plain = LgLock::new(|_| 0_u64);
    let parking_lot = Mutex::new(0_u64);
    let sharded = ShardedLock::new(0_u64);

    let rounds = Group::new("lock all and unlock")
        .case(Case::new("LgLock global", 1, |_| {
            |_| {
                black_box(&plain.global().expect(FREE));
            }
        }))
        .case(Case::new("parking_lot Mutex", 1, |_| {
            |_| {
                black_box(&*parking_lot.lock());
            }
        }))
        .case(Case::new("ShardedLock write", 1, |_| {
            |_| {
                black_box(&*sharded.write().expect(FREE));
            }
        }))
        .run(plan);
    report.show(&rounds);
    let peers = ["parking_lot Mutex", "ShardedLock write"];
    report.against(&rounds, "LgLock global", 1, &peers);

    let plain = rounds.time_ratio("LgLock global/1", "parking_lot Mutex/1");
    report.record("P4.plain.global_vs_parking_lot", plain);
}
