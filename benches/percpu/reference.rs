//! P3, and P8 without rseq: taking a reference to a shared object and giving it back.

use std::hint::black_box;
use std::sync::Arc;

use harness::{Case, Group, Plan, Report};
use offlock_percpu::PercpuRef;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let ours = PercpuRef::new(|| {});
    let arc = Arc::new(0_u64);

    let mut group = Group::new("get and put, one hot object");
    for &threads in &plan.threads {
        group = group
            .case(Case::new("PercpuRef get+put", threads, |_| {
                |_| {
                    let got = ours.try_get();
                    black_box(&got);
                }
            }))
            .case(Case::new("Arc clone+drop", threads, |_| {
                |_| {
                    let got = Arc::clone(&arc);
                    black_box(&got);
                }
            }));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
    for threads in [1, 2] {
        report.against(&rounds, "PercpuRef get+put", threads, &["Arc clone+drop"]);
    }

    let alone = rounds.time_ratio("PercpuRef get+put/1", "Arc clone+drop/1");
    let hot = rounds.tput_ratio("PercpuRef get+put/2", "Arc clone+drop/2");
    report.record("P3.arc", alone);
    report.record("P3.arc_hot_2t.tput", hot);
    report.record("P8.ref_arc", alone);
    report.record("P8.ref_arc_hot_2t.tput", hot);
}
