//! The rows of P1 to P5, P7 and P8.

use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_epoch as epoch;
use crossbeam_utils::CachePadded;
use crossbeam_utils::sync::ShardedLock;
use harness::{Case, Group, Plan, Ratio, Report};
use offlock_percpu::lglock::LgLock;
use offlock_percpu::{PerCpuCounter, PercpuRef, fence, rcu};
use parking_lot::Mutex;

/// The message of `expect`: no lock is refused.
const FREE: &str = "no thread panics or locks twice";

/// Whether this process has rseq sections. Without, it measures P8 and no other target.
pub(crate) fn has_sections() -> bool {
    offlock_percpu::capabilities().sections.is_ok()
}

fn group(name: &str) -> Group<'_> {
    Group::new(&format!("{name}{}", if has_sections() { "" } else { ", without rseq" }))
}

fn record(report: &mut Report, id: &str, ratio: Option<Ratio>) {
    if id.starts_with("P8.") != has_sections() {
        report.record(id, ratio);
    }
}

thread_local! {
    /// The number of a thread, for a program that numbers its threads instead of asking for the CPU.
    static SLOT: Cell<usize> = const { Cell::new(0) };
}

/// P1: which CPU am I on?
pub(crate) fn cpu(plan: &Plan, report: &mut Report) {
    let rounds = group("which CPU")
        .case(Case::op("current_cpu", 1, offlock_percpu::current_cpu))
        // SAFETY: the call takes no argument and reads no memory of ours.
        .case(Case::op("sched_getcpu", 1, || unsafe { libc::sched_getcpu() }))
        .case(Case::new("const thread-local read", 1, |thread| {
            SLOT.set(black_box(thread)); // not a constant that the optimiser could carry to the read
            |_| {
                black_box(SLOT.get());
            }
        }))
        .run(plan);
    report.compare(&rounds, &["current_cpu"]);
    let ours = "current_cpu";
    record(report, "P1.tls", rounds.time_ratio(ours, "const thread-local read"));
    record(report, "P1.sched_getcpu", rounds.time_ratio(ours, "sched_getcpu"));
}

/// P2, and P8 without rseq: adding to a counter.
pub(crate) fn counter(plan: &Plan, report: &mut Report) {
    static OURS: PerCpuCounter = PerCpuCounter::new();

    // Ordering, for every peer: Relaxed; a statistics counter, it publishes nothing.
    let shared = CachePadded::new(AtomicU64::new(0));
    let most = plan.threads.iter().max().map_or(1, |most| *most);
    let padded: Vec<CachePadded<AtomicU64>> = (0..most).map(|_| CachePadded::default()).collect();
    let cpus = offlock_percpu::possible_cpus();
    let by_cpu: Vec<CachePadded<AtomicU64>> = (0..cpus).map(|_| CachePadded::default()).collect();

    let mut group = group("counter add");
    for &threads in &plan.threads {
        group = group
            .case(Case::op("PerCpuCounter", threads, || OURS.add(1)))
            // Which slot is a thread's own costs nothing here.
            .case(Case::new("padded per thread", threads, |thread| {
                let own = &padded[thread];
                move |_| {
                    own.fetch_add(1, Ordering::Relaxed);
                }
            }))
            .case(Case::op("sched_getcpu + padded", threads, || {
                // SAFETY: the call takes no argument and reads no memory of ours.
                let cpu = unsafe { libc::sched_getcpu() } as usize;
                by_cpu[cpu].fetch_add(1, Ordering::Relaxed)
            }))
            .case(Case::op("shared fetch_add", threads, || shared.fetch_add(1, Ordering::Relaxed)));
    }
    let rounds = group.run(plan);
    report.compare(&rounds, &["PerCpuCounter"]);

    let ours = "PerCpuCounter";
    record(report, "P2.padded", rounds.time_ratio(ours, "padded per thread"));
    record(report, "P2.scale", rounds.scale(ours));
    let hot = rounds.tput_ratio("PerCpuCounter/2", "shared fetch_add/2");
    record(report, "P2.shared_2t.tput", hot);
    record(report, "P8.counter", rounds.time_ratio(ours, "sched_getcpu + padded"));
}

/// P3, and P8 without rseq: taking a reference to a shared object and giving it back.
pub(crate) fn reference(plan: &Plan, report: &mut Report) {
    let (ours, arc) = (PercpuRef::new(|| {}), Arc::new(0_u64));
    let mut group = group("get and put, one hot object");
    for &threads in &plan.threads {
        group = group
            .case(Case::op("PercpuRef get+put", threads, || ours.try_get()))
            .case(Case::op("Arc clone+drop", threads, || Arc::clone(&arc)));
    }
    let rounds = group.run(plan);
    report.compare(&rounds, &["PercpuRef get+put"]);
    let alone = rounds.time_ratio("PercpuRef get+put", "Arc clone+drop");
    let hot = rounds.tput_ratio("PercpuRef get+put/2", "Arc clone+drop/2");
    record(report, "P3.arc", alone);
    record(report, "P3.arc_hot_2t.tput", hot);
    record(report, "P8.ref_arc", alone);
    record(report, "P8.ref_arc_hot_2t.tput", hot);
}

/// P4: the local-global lock against locks that one thread at a time holds.
///
/// No thread waits in a row with one thread. In rows with two, the peers' threads contend for their
/// one lock, and ours each lock the slot of their own CPU, which is the purpose of the lock.
pub(crate) fn lock(plan: &Plan, report: &mut Report) {
    let plain = LgLock::new(|_| 0_u64);
    let (parking_lot, sharded) = (Mutex::new(0_u64), ShardedLock::new(0_u64));
    let spin = spin::Mutex::<u64>::new(0);
    let mut group = group("lock and unlock");
    for threads in [1, 2] {
        group = group
            .case(Case::op("LgLock local", threads, || *plain.local().expect(FREE)))
            .case(Case::op("parking_lot Mutex", threads, || *parking_lot.lock()))
            .case(Case::op("spin Mutex", threads, || *spin.lock()))
            .case(Case::op("ShardedLock read", threads, || *sharded.read().expect(FREE)));
    }
    let rounds = group.case(Case::op("LgLock global", 1, || plain.global().expect(FREE))).run(plan);
    report.compare(&rounds, &["LgLock local", "LgLock global"]);
    let local = "LgLock local";
    record(report, "P4.plain.parking_lot", rounds.time_ratio(local, "parking_lot Mutex"));
    record(report, "P4.plain.sharded_lock", rounds.time_ratio(local, "ShardedLock read"));
    record(report, "P4.plain.scale", rounds.scale(local));
    let global = rounds.time_ratio("LgLock global", "parking_lot Mutex");
    record(report, "P4.plain.global_vs_parking_lot", global);
}

/// P5: entering and leaving a read-side section.
pub(crate) fn pin(plan: &Plan, report: &mut Report) {
    let seize = seize::Collector::new();
    let mut group = group("pin and unpin");
    for &threads in &plan.threads {
        group = group
            .case(Case::op("rcu::pin", threads, rcu::pin))
            .case(Case::op("crossbeam_epoch::pin", threads, epoch::pin))
            .case(Case::op("seize enter+leave", threads, || seize.enter()));
    }
    let rounds = group.run(plan);
    report.compare(&rounds, &["rcu::pin"]);
    record(report, "P5.epoch", rounds.time_ratio("rcu::pin", "crossbeam_epoch::pin"));
    record(report, "P5.seize", rounds.time_ratio("rcu::pin", "seize enter+leave"));
    record(report, "P5.scale", rounds.scale("rcu::pin"));
}

/// P7: the heavy fence. One thread; no other thread of the process runs, so the fence interrupts none.
pub(crate) fn heavy(plan: &Plan, report: &mut Report) {
    fence::heavy(); // the first call registers the process, without which the system call refuses
    let rounds = Group::new("fence on every CPU")
        .case(Case::op("heavy()", 1, fence::heavy))
        .case(Case::op("membarrier", 1, || {
            let command = libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED;
            // SAFETY: takes numbers and touches no memory of ours.
            let rc = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
            assert_eq!(rc, 0, "membarrier");
        }))
        .run(plan);
    report.compare(&rounds, &["heavy()"]);
    record(report, "P7.heavy_vs_syscall", rounds.time_ratio("heavy()", "membarrier"));
}

/// The value that is replaced: two cache lines, as a small node.
type Value = [u64; 16];

/// P7: allocate, swap in, retire what was there, and free what is due: everything, on the one thread
/// that does it. Each side collects when it likes to.
pub(crate) fn retire(plan: &Plan, report: &mut Report) {
    let value = |i| -> Value { [i; 16] };
    let ours = rcu::Atomic::new(value(0));
    let theirs = epoch::Atomic::new(value(0));
    let rounds = Group::new("allocate, swap, retire, free")
        .case(Case::new("rcu retire", 1, |_| |i| ours.swap(rcu::Owned::new(value(i))).retire()))
        .case(Case::new("crossbeam_epoch defer", 1, |_| {
            |i| {
                let guard = epoch::pin();
                let old = theirs.swap(epoch::Owned::new(value(i)), Ordering::AcqRel, &guard);
                // SAFETY: `old` is out of the only place that led to it, and is retired once.
                unsafe { guard.defer_destroy(old) };
            }
        }))
        .run(plan);
    report.compare(&rounds, &["rcu retire"]);
    let epoch = rounds.time_ratio("rcu retire", "crossbeam_epoch defer");
    record(report, "P7.retire_vs_epoch", epoch);
    // SAFETY: the group is over; no other guard or thread has it.
    drop(unsafe { theirs.into_owned() });
}
