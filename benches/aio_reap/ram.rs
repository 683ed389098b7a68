//! A2: reads of a RAM disk, which takes less time than most programs around it.

use harness::{Plan, Report};

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
        ("aio-reap registered", Kind::Thread(ours::registered)),
        ("aio-reap Linux AIO", Kind::Thread(ours::aio)),
        ("io-uring", Kind::Thread(raw::reads)),
        ("io-uring registered", Kind::Thread(raw::registered)),
    ];
    rows.extend(peers::rows());
    rows.extend([
        ("fio io_uring batched", fio_batched("io_uring", DEPTH, &[])),
        (
            "fio io_uring registered",
            fio_batched("io_uring", DEPTH, &["--fixedbufs=1", "--registerfiles=1"]),
        ),
        ("fio io_uring", fio("io_uring")),
        ("fio libaio batched", fio_batched("libaio", DEPTH, &[])),
        ("fio libaio", fio("libaio")),
    ]);
    let group = format!("{}, 4 KiB reads, {DEPTH} deep", device.name);
    let rounds = measure(&group, plan, 10 * plan.window, &device, DEPTH, &rows);
    report.show(&rounds);
    // Like with like; what is registered only against the same.
    let others: Vec<_> = rows.iter().map(|row| row.0).skip(3).collect();
    let plain = |name: &&&str| !name.ends_with("registered");
    let plain: Vec<_> = others.iter().filter(plain).copied().collect();
    report.against(&rounds, "aio-reap io_uring", 1, &plain);
    let registered = ["io-uring registered", "fio io_uring registered"];
    report.against(&rounds, "aio-reap registered", 1, &registered);
    report.against(&rounds, "aio-reap Linux AIO", 1, &["fio libaio batched", "fio libaio"]);

    let worst = |pairs: [(&str, &str); 2]| {
        let ratios: Option<Vec<f64>> =
            pairs.iter().map(|(ours, peer)| rounds.tput_ratio(ours, peer)).collect();
        ratios?.into_iter().reduce(f64::min)
    };
    let (ours, registered) = ("aio-reap io_uring/1", "aio-reap registered/1");
    let raw = worst([(ours, "io-uring/1"), (registered, "io-uring registered/1")]);
    report.record("A2.raw.tput", raw);
    let fio = [(ours, "fio io_uring batched/1"), (registered, "fio io_uring registered/1")];
    report.record("A2.fio_batched.tput", worst(fio));
    if !peers::TASKS_ON_RINGS.is_empty() {
        // The best of those that could be measured: one that does not run here is no competitor.
        let ratio = |peer: &&str| {
            let ratio = rounds.tput_ratio(ours, peer);
            if ratio.is_none() {
                println!("# A2.best_runtime: without {peer}, which was not measured");
            }
            ratio
        };
        let best = peers::TASKS_ON_RINGS.iter().filter_map(ratio).reduce(f64::min);
        report.record("A2.best_runtime.tput", best);
    }
}
