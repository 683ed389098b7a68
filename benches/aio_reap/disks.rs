//! A2: reads of a RAM disk, which takes less time than most programs around it. A3: reads of a disk, which take
//! far longer than any program around them.

use harness::{Plan, Ratio, Report};

use crate::device::Device;
use crate::readers;
use crate::reads::{Kind, Rows, fio_batched, fio_length, measure};
#[cfg(feature = "runtimes")]
use crate::runtimes;

const OURS: &str = "aio-reap io_uring";
const AIO: &str = "aio-reap Linux AIO";
const DEPTH: usize = 32;
/// The runtimes whose tasks wait for a ring.
const TASKS_ON_RINGS: &[&str] =
    if cfg!(feature = "runtimes") { &["tokio-uring", "monoio", "compio"] } else { &[] };

/// Ours, the bare ring, and the runtimes that were compiled in.
fn rows() -> Rows {
    #[cfg(not(feature = "runtimes"))]
    println!("# built without runtimes: --features runtimes adds tokio-uring, monoio and compio");
    vec![
        (OURS, Kind::Reader(readers::uring)),
        (AIO, Kind::Reader(readers::aio)),
        ("io-uring", Kind::Reader(readers::raw)),
        #[cfg(feature = "runtimes")]
        ("tokio-uring", Kind::Reader(runtimes::tokio_uring)),
        #[cfg(feature = "runtimes")]
        ("monoio", Kind::Reader(runtimes::monoio)),
        #[cfg(feature = "runtimes")]
        ("compio", Kind::Reader(runtimes::compio)),
    ]
}

pub(crate) fn run_ram(plan: &Plan, report: &mut Report) {
    harness::header::programs(&["fio"]);
    let device = match Device::ram() {
        Ok(device) => device,
        Err(error) => {
            return println!("# not measured: no RAM disk (it takes root and zram): {error}");
        }
    };
    let mut rows = rows();
    rows.push(("fio io_uring batched", fio_batched("io_uring", DEPTH)));
    let group = format!("{}, 4 KiB reads, {DEPTH} deep", device.name);
    let rounds = measure(&group, plan, 10 * plan.window, &device, DEPTH, &rows);
    report.compare(&rounds, &[OURS, AIO]);
    report.record("A2.raw.tput", rounds.tput_ratio(OURS, "io-uring"));
    report.record("A2.fio_batched.tput", rounds.tput_ratio(OURS, "fio io_uring batched"));
    if !TASKS_ON_RINGS.is_empty() {
        // The best of those that could be measured: one that does not run here is no competitor.
        let ratio = |peer: &&str| {
            let ratio = rounds.tput_ratio(OURS, peer);
            if ratio.is_none() {
                println!("# A2.best_runtime: without {peer}, which was not measured");
            }
            ratio
        };
        let best = TASKS_ON_RINGS.iter().filter_map(ratio).reduce(Ratio::lower);
        report.record("A2.best_runtime.tput", best);
    }
}

pub(crate) fn run_disk(plan: &Plan, report: &mut Report) {
    harness::header::programs(&["fio"]);
    let device = match Device::disk() {
        Ok(device) => device,
        Err(error) => return println!("# not measured: {error}"),
    };
    let plan = Plan { min_overlap: 0.0, ..plan.clone() }; // threads sleep most of the time
    for depth in [32, 128] {
        let mut rows = rows();
        rows.extend([
            ("fio io_uring", fio_batched("io_uring", depth)),
            ("fio libaio", fio_batched("libaio", depth)),
        ]);
        let group = format!("{}, 4 KiB reads, {depth} deep", device.name);
        let rounds = measure(&group, &plan, fio_length(&plan), &device, depth, &rows);
        report.compare(&rounds, &[OURS, AIO]);
        let ratio = |(ours, fio)| rounds.tput_ratio(ours, fio);
        let ratios = [(OURS, "fio io_uring"), (AIO, "fio libaio")].map(ratio);
        let worst = ratios[0].zip(ratios[1]).map(|(ours, aio)| ours.lower(aio));
        report.record(&format!("A3.fio@{depth}.tput"), worst);
    }
}
