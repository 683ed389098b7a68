//! P1: which CPU am I on?

use std::cell::Cell;
use std::hint::black_box;

use harness::{Case, Group, Plan, Report};

thread_local! {
    /// The number of a thread, for a program that numbers its threads instead of asking for the CPU.
    static SLOT: Cell<usize> = const { Cell::new(0) };
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let ours = |threads| {
        Case::new("current_cpu", threads, |_| {
            |_| {
                black_box(offlock_percpu::current_cpu());
            }
        })
    };
    let rounds = Group::new("which CPU")
        .case(ours(1))
        .case(ours(2))
        .case(Case::new("sched_getcpu", 1, |_| {
            |_| {
                // SAFETY: the call takes no argument and reads no memory of ours.
                black_box(unsafe { libc::sched_getcpu() });
            }
        }))
        .case(Case::new("const thread-local read", 1, |thread| {
            SLOT.set(black_box(thread)); // not a constant that the optimiser could carry to the read
            |_| {
                black_box(SLOT.get());
            }
        }))
        .run(plan);
    report.show(&rounds);
    report.against(&rounds, "current_cpu", 1, &["const thread-local read", "sched_getcpu"]);
    let ours = "current_cpu/1";
    report.record("P1.tls", rounds.time_ratio(ours, "const thread-local read/1"));
    report.record("P1.sched_getcpu", rounds.time_ratio(ours, "sched_getcpu/1"));
}
