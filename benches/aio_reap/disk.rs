//! A3: reads of a disk, which take far longer than any program around them.

use harness::{Plan, Ratio, Report};

use crate::device::Device;
use crate::reads::{Kind, Rows, fio_batched, fio_length, measure};
use crate::{ours, peers, raw};

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let device = match Device::disk() {
        Ok(device) => device,
        Err(error) => {
            println!("# not measured: {error}");
            return;
        }
    };
    let plan = Plan { min_overlap: 0.0, ..plan.clone() }; // threads sleep most of the time
    for depth in [32, 128] {
        let mut rows: Rows = vec![
            ("aio-reap io_uring", Kind::Thread(ours::uring)),
            ("aio-reap Linux AIO", Kind::Thread(ours::aio)),
            ("io-uring", Kind::Thread(raw::reads)),
        ];
        rows.extend(peers::rows());
        rows.extend([
            ("fio io_uring", fio_batched("io_uring", depth)),
            ("fio libaio", fio_batched("libaio", depth)),
        ]);
        let group = format!("{}, 4 KiB reads, {depth} deep", device.name);
        let rounds = measure(&group, &plan, fio_length(&plan), &device, depth, &rows);
        report.show(&rounds);
        let others: Vec<_> = rows.iter().map(|row| row.0).skip(2).collect();
        report.against(&rounds, "aio-reap io_uring", 1, &others);
        report.against(&rounds, "aio-reap Linux AIO", 1, &["fio libaio"]);
        let pairs =
            [("aio-reap io_uring/1", "fio io_uring/1"), ("aio-reap Linux AIO/1", "fio libaio/1")];
        let ratios: Option<Vec<Ratio>> =
            pairs.iter().map(|(ours, fio)| rounds.tput_ratio(ours, fio)).collect();
        let worst = ratios.and_then(|ratios| ratios.into_iter().reduce(Ratio::lower));
        report.record(&format!("A3.fio@{depth}.tput"), worst);
    }
}
