//! P2, and P8 without rseq: adding to a counter.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use harness::{Case, Group, Plan, Report};
use offlock_percpu::PerCpuCounter;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    static OURS: PerCpuCounter = PerCpuCounter::new();

    // Ordering, for every peer: Relaxed; a statistics counter, it publishes nothing.
    let shared = CachePadded::new(AtomicU64::new(0));
    let most = plan.threads.iter().max().map_or(1, |most| *most);
    let padded: Vec<CachePadded<AtomicU64>> = (0..most).map(|_| CachePadded::default()).collect();
    let cpus = offlock_percpu::possible_cpus();
    let by_cpu: Vec<CachePadded<AtomicU64>> = (0..cpus).map(|_| CachePadded::default()).collect();

    let mut group = Group::new("counter add");
    for &threads in &plan.threads {
        group = group
            .case(Case::new("PerCpuCounter", threads, |_| |_| OURS.add(1)))
            // Which slot is a thread's own costs nothing here.
            .case(Case::new("padded per thread", threads, |thread| {
                let own = &padded[thread];
                move |_| {
                    own.fetch_add(1, Ordering::Relaxed);
                }
            }))
            .case(Case::new("sched_getcpu + padded", threads, |_| {
                |_| {
                    // SAFETY: the call takes no argument and reads no memory of ours.
                    let cpu = unsafe { libc::sched_getcpu() } as usize;
                    by_cpu[cpu].fetch_add(1, Ordering::Relaxed);
                }
            }))
            .case(Case::new("shared fetch_add", threads, |_| {
                |_| {
                    shared.fetch_add(1, Ordering::Relaxed);
                }
            }));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
    let peers = ["padded per thread", "sched_getcpu + padded", "shared fetch_add"];
    for threads in [1, 2] {
        report.against(&rounds, "PerCpuCounter", threads, &peers);
    }

    let ours = "PerCpuCounter/1";
    report.record("P2.padded", rounds.time_ratio(ours, "padded per thread/1"));
    report.record("P2.scale", rounds.tput_ratio("PerCpuCounter/2", ours));
    let hot = rounds.tput_ratio("PerCpuCounter/2", "shared fetch_add/2");
    report.record("P2.shared_2t.tput", hot);
    report.record("P8.counter", rounds.time_ratio(ours, "sched_getcpu + padded/1"));
}
