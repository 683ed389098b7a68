//! A2: reads of a RAM disk, which takes less time than most programs around it.

use harness::{Plan, Ratio, Report};

use crate::device::Device;
use crate::reads::{Kind, Rows, fio, fio_batched, measure};
use crate::{ours, peers, raw};

const DEPTH: usize = 32;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let device = match Device::ram() {
        Ok(device) => device,
        Err(error) => {
            println!("# not measured: no RAM disk (it takes root and zram): {error}");
            return;
        }
    };
    let mut rows: Rows = vec![
        ("aio-reap io_uring", Kind::Thread(ours::uring)),
        ("aio-reap Linux AIO", Kind::Thread(ours::aio)),
        ("io-uring", Kind::Thread(raw::reads)),
    ];
    rows.extend(peers::rows());
    rows.extend([
        ("fio io_uring batched", fio_batched("io_uring", DEPTH)),
        ("fio io_uring", fio("io_uring")),
        ("fio libaio batched", fio_batched("libaio", DEPTH)),
        ("fio libaio", fio("libaio")),
    ]);
    let group = format!("{}, 4 KiB reads, {DEPTH} deep", device.name);
    let rounds = measure(&group, plan, 10 * plan.window, &device, DEPTH, &rows);
    report.show(&rounds);
    let others: Vec<_> = rows.iter().map(|row| row.0).skip(2).collect();
    report.against(&rounds, "aio-reap io_uring", 1, &others);
    report.against(&rounds, "aio-reap Linux AIO", 1, &["fio libaio batched", "fio libaio"]);

    let ours = "aio-reap io_uring/1";
    report.record("A2.raw.tput", rounds.tput_ratio(ours, "io-uring/1"));
    report.record("A2.fio_batched.tput", rounds.tput_ratio(ours, "fio io_uring batched/1"));
    if !peers::TASKS_ON_RINGS.is_empty() {
        // The best of those that could be measured: one that does not run here is no competitor.
        let ratio = |peer: &&str| {
            let ratio = rounds.tput_ratio(ours, peer);
            if ratio.is_none() {
                println!("# A2.best_runtime: without {peer}, which was not measured");
            }
            ratio
        };
        let best = peers::TASKS_ON_RINGS.iter().filter_map(ratio).reduce(Ratio::lower);
        report.record("A2.best_runtime.tput", best);
    }
}
