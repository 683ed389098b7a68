//! P5: entering and leaving a read-side section, alone and around the load of a pointer.

use std::hint::black_box;
use std::sync::atomic::{AtomicPtr, Ordering};

use arc_swap::ArcSwap;
use crossbeam_epoch as epoch;
use haphazard::HazardPointer;
use harness::{Case, Group, Plan, Report};
use offlock_percpu::rcu;
use parking_lot::RwLock;
use seize::Guard as _;

const OURS: &str = "rcu::pin";
const EPOCH: &str = "crossbeam_epoch::pin";
const SEIZE: &str = "seize enter+leave";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let seize = seize::Collector::new();

    let mut group = Group::new("pin and unpin");
    for &threads in &plan.threads {
        group = group
            .case(Case::new(OURS, threads, |_| {
                |_| {
                    black_box(&rcu::pin());
                }
            }))
            .case(Case::new(EPOCH, threads, |_| {
                |_| {
                    black_box(&epoch::pin());
                }
            }))
            .case(Case::new(SEIZE, threads, |_| {
                |_| {
                    black_box(&seize.enter());
                }
            }));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
    for threads in [1, 2] {
        report.against(&rounds, OURS, threads, &[EPOCH, SEIZE]);
    }
    let row = |name: &str, threads: usize| format!("{name}/{threads}");
    let (ours, epoch) = (row(OURS, 1), row(EPOCH, 1));
    report.record("P5.epoch", rounds.time_ratio(&ours, &epoch));
    report.record("P5.seize", rounds.time_ratio(&ours, &row(SEIZE, 1)));
    report.record("P5.scale", rounds.tput_ratio(&row(OURS, 2), &ours));
}

/// One thread reads the value behind a pointer that no thread replaces meanwhile.
pub(crate) fn run_read(plan: &Plan, report: &mut Report) {
    let ours = rcu::Atomic::new(1_u64);
    let theirs = epoch::Atomic::new(1_u64);
    let seize = seize::Collector::new();
    let seized = AtomicPtr::new(Box::into_raw(Box::new(1_u64)));
    let hazardous = haphazard::AtomicPtr::from(Box::new(1_u64));
    let swappable = ArcSwap::from_pointee(1_u64);
    let locked = RwLock::new(1_u64);

    let rounds = Group::new("read behind a pointer")
        .case(Case::new(OURS, 1, |_| {
            |_| {
                let guard = rcu::pin();
                black_box(*ours.load(&guard));
            }
        }))
        .case(Case::batched("rcu::pin held", 1, |_| {
            |ops| {
                let guard = rcu::pin();
                for _ in 0..ops {
                    black_box(*ours.load(&guard));
                }
            }
        }))
        .case(Case::new(EPOCH, 1, |_| {
            |_| {
                let guard = epoch::pin();
                let value = theirs.load(Ordering::Acquire, &guard);
                // SAFETY: null, or a live value: this bench frees nothing before the group ends.
                black_box(unsafe { value.as_ref() }.copied());
            }
        }))
        .case(Case::batched("crossbeam_epoch::pin held", 1, |_| {
            |ops| {
                let guard = epoch::pin();
                for _ in 0..ops {
                    let value = theirs.load(Ordering::Acquire, &guard);
                    // SAFETY: as above.
                    black_box(unsafe { value.as_ref() }.copied());
                }
            }
        }))
        .case(Case::new(SEIZE, 1, |_| {
            |_| {
                let guard = seize.enter();
                let value = guard.protect(&seized, Ordering::Acquire);
                // SAFETY: as above.
                black_box(unsafe { value.as_ref() }.copied());
            }
        }))
        .case(Case::batched("seize held", 1, |_| {
            |ops| {
                let guard = seize.enter();
                for _ in 0..ops {
                    let value = guard.protect(&seized, Ordering::Acquire);
                    // SAFETY: as above.
                    black_box(unsafe { value.as_ref() }.copied());
                }
            }
        }))
        // Its documentation: keep the hazard pointer, protect anew for every read.
        .case(Case::new("haphazard protect", 1, |_| {
            let mut hazard = HazardPointer::new();
            let hazardous = &hazardous;
            move |_| {
                black_box(hazardous.safe_load(&mut hazard).copied());
                hazard.reset_protection();
            }
        }))
        .case(Case::new("arc-swap load", 1, |_| {
            |_| {
                black_box(**swappable.load());
            }
        }))
        .case(Case::new("arc_swap::Cache load", 1, |_| {
            let mut cache = arc_swap::Cache::new(&swappable);
            move |_| {
                black_box(**cache.load());
            }
        }))
        .case(Case::new("parking_lot RwLock read", 1, |_| {
            |_| {
                black_box(*locked.read());
            }
        }))
        .run(plan);
    report.show(&rounds);
    let peers = ["haphazard protect", "arc-swap load", "parking_lot RwLock read"];
    report.against(&rounds, OURS, 1, &[EPOCH, SEIZE]);
    report.against(&rounds, OURS, 1, &peers);
    report.against(&rounds, "rcu::pin held", 1, &["crossbeam_epoch::pin held", "seize held"]);

    // SAFETY: made above by `Box::into_raw`, and the group that read it is over.
    drop(unsafe { Box::from_raw(seized.into_inner()) });
    // SAFETY: the group is over; no other guard or thread has it.
    drop(unsafe { theirs.into_owned() });
    // SAFETY: it is still in place, and goes out of scope with no reader left.
    unsafe { hazardous.retire() };
}
