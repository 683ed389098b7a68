//! P7: the heavy fence.

use harness::{Case, Group, Plan};
use percpu::fence;

use crate::report::Report;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    run_heavy(plan, report);
}

/// One thread, and no other of this process at work: there is nobody to interrupt.
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
    report.against(&rounds, "heavy()/1", &["membarrier/1"]);
    report.record("P7.heavy_vs_syscall", rounds.time_ratio("heavy()/1", "membarrier/1"));
}
