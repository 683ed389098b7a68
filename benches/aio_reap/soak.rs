//! A6: 10^8 requests (5 million with `--quick`) on a simulated device on which everything goes wrong
//! now and then.

use std::io;
use std::time::Instant;

use aio_reap::{Engine, ReapMode};
use aio_reap_test::Build;
use aio_reap_test::sim::{ClosedLoop, Faults, Model, Service, Sim, Workload};
use harness::{Plan, Report, Table};

use testkit::alloc::counted;

const WARM_UP: u64 = 200_000;
const MODES: [ReapMode; 2] = [ReapMode::OnTurn, ReapMode::AfterSubmit];

/// The result of one run.
struct Soaked {
    requests: u64,
    failed: u64,
    lost: u64,
    twice: u64,
    allocations: u64,
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let millions = if plan.rounds > 100 { 100 } else { 5 };
    let requests = millions * 1_000_000 / MODES.len() as u64 + 1;
    let (mut allocations, mut wrong) = (0, 0);
    let columns = ["requests", "failed", "lost", "twice", "allocations", "ns each, real"];
    let mut table = Table::new("reap mode", columns);
    for mode in MODES {
        let start = Instant::now();
        let soaked = match soak(mode, requests) {
            Ok(soaked) => soaked,
            Err(error) => return println!("# not measured: {error}"),
        };
        let Soaked { requests, failed, lost, twice, allocations: made } = soaked;
        let each = start.elapsed().as_nanos() as f64 / requests as f64;
        let counts = [requests, failed, lost, twice, made].map(|count| count.to_string());
        table.row(format!("{mode:?}"), counts.into_iter().chain([format!("{each:.1}")]));
        allocations += made;
        wrong += lost + twice;
    }
    print!("{table}");
    report.record("A6.allocs.n", Some(allocations as f64));
    report.record("A6.lost_or_twice.n", Some(wrong as f64));
}

fn soak(mode: ReapMode, requests: u64) -> io::Result<Soaked> {
    let faults = Faults {
        busy: 20_000,
        partial: 50_000,
        refused: 10_000,
        failed: 5_000,
        again: 20_000,
        short: 50_000,
    };
    let service = Service::Bursty { fast: 10_000, slow: 90_000, run: 100 };
    let model = Model { service, faults, inline: 50_000, ..Model::default() };
    let sim = Sim::new(model, 3);
    let builder = Engine::builder().depth(64).reap_mode(mode);
    let engines = [builder.clone().build_sim(&sim)?, builder.build_sim(&sim)?];
    let workload = Workload {
        queues: 8,
        depth: 32,
        sizes: vec![(4, 4096), (1, 65_536)],
        ask: 500,
        done: 200,
        think: 5_000,
    };
    let mut load = ClosedLoop::new(&sim, &engines, workload, 4)?;
    load.run(WARM_UP)?;
    let mut ran = Ok(());
    let made = counted(|| {
        ran = load.run(requests).and_then(|()| load.drain());
    })
    .1
    .allocations;
    ran?;
    let figures = load.figures();
    // Requests that an engine accepted and never completed, and completions without a request.
    let missing = engines.iter().map(|engine| {
        let stats = engine.stats();
        stats.accepted.abs_diff(stats.completed) + stats.stray
    });
    Ok(Soaked {
        requests: figures.requests,
        failed: figures.failed,
        lost: load.outstanding() as u64 + missing.sum::<u64>(),
        twice: figures.twice,
        allocations: made,
    })
}
