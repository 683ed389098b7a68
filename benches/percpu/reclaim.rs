//! P7: the heavy fence, and replacing a value behind a pointer that readers may hold.

use std::sync::atomic::{AtomicPtr, Ordering};

use arc_swap::ArcSwap;
use crossbeam_epoch as epoch;
use harness::{Case, Group, Plan, Report};
use offlock_percpu::{fence, rcu};
use seize::Guard as _;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    run_heavy(plan, report);
    run_retire(plan, report);
}

/// One thread. No other thread of the process runs, so the fence interrupts none.
fn run_heavy(plan: &Plan, report: &mut Report) {
    fence::heavy(); // the first call registers the process, without which the system call refuses
    let rounds = Group::new("fence on every CPU")
        .case(Case::new("heavy()", 1, |_| |_| fence::heavy()))
        .case(Case::new("membarrier", 1, |_| {
            |_| {
                let command = libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED;
                // SAFETY: takes numbers and touches no memory of ours.
                let rc = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
                assert_eq!(rc, 0, "membarrier");
            }
        }))
        .run(plan);
    report.show(&rounds);
    report.against(&rounds, "heavy()", 1, &["membarrier"]);
    report.record("P7.heavy_vs_syscall", rounds.time_ratio("heavy()/1", "membarrier/1"));
}

/// The value that is replaced: two cache lines, as a small node.
type Value = [u64; 16];

/// Allocate, swap in, retire what was there, and free what is due: everything, on the one thread
/// that does it. Each side collects when it likes to.
fn run_retire(plan: &Plan, report: &mut Report) {
    let value = |i| -> Value { [i; 16] };
    let ours = rcu::Atomic::new(value(0));
    let theirs = epoch::Atomic::new(value(0));
    let seize = seize::Collector::new();
    let seized = AtomicPtr::new(Box::into_raw(Box::new(value(0))));
    let hazardous = haphazard::AtomicPtr::from(Box::new(value(0)));
    let swappable = ArcSwap::from_pointee(value(0));

    let rounds = Group::new("allocate, swap, retire, free")
        .case(Case::new("rcu retire", 1, |_| {
            |i| {
                let new = rcu::Owned::new(value(i));
                ours.swap(new).retire();
            }
        }))
        .case(Case::new("crossbeam_epoch defer", 1, |_| {
            |i| {
                let guard = epoch::pin();
                let old = theirs.swap(epoch::Owned::new(value(i)), Ordering::AcqRel, &guard);
                // SAFETY: `old` is out of the only place that led to it, and is retired once.
                unsafe { guard.defer_destroy(old) };
            }
        }))
        .case(Case::new("seize retire", 1, |_| {
            |i| {
                let guard = seize.enter();
                let new = Box::into_raw(Box::new(value(i)));
                let old = guard.swap(&seized, new, Ordering::AcqRel);
                // SAFETY: as above; every value behind `seized` came from `Box::into_raw`.
                unsafe { guard.defer_retire(old, seize::reclaim::boxed) };
            }
        }))
        .case(Case::new("haphazard retire", 1, |_| {
            |i| {
                let old = hazardous.swap(Box::new(value(i))).expect("there was one");
                // SAFETY: as above.
                unsafe { old.retire() };
            }
        }))
        .case(Case::new("arc-swap store", 1, |_| {
            |i| swappable.store(std::sync::Arc::new(value(i)))
        }))
        .run(plan);
    report.show(&rounds);
    let peers = ["crossbeam_epoch defer", "seize retire", "haphazard retire", "arc-swap store"];
    report.against(&rounds, "rcu retire", 1, &peers);
    let epoch = rounds.time_ratio("rcu retire/1", "crossbeam_epoch defer/1");
    report.record("P7.retire_vs_epoch", epoch);

    // SAFETY: from `Box::into_raw`, and the group is over.
    drop(unsafe { Box::from_raw(seized.into_inner()) });
    // SAFETY: the group is over; no other guard or thread has it.
    drop(unsafe { theirs.into_owned() });
    // SAFETY: it is still in place, and goes out of scope with no reader left.
    unsafe { hazardous.retire() };
}
