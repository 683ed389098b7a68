//! L1, L2, L5 and L8: an object is added, and removed where it was added.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};

use harness::{Group, Plan, Ratio, Report, Rounds};

use crate::ours::Owning;
use crate::peers::{Dash, MutexList, MutexSlab, ShardedList, ShardedSlab};
use crate::registry::{Entries, LIVE, Registry, pair};

const OURS: &str = Owning::NAME;
const LIST: &str = MutexList::NAME;
const SLAB: &str = MutexSlab::NAME;
const SHARDED_LIST: &str = ShardedList::NAME;
const SHARDED_SLAB: &str = ShardedSlab::NAME;
const DASHMAP: &str = Dash::NAME;
const PEERS: [&str; 4] = [LIST, SLAB, SHARDED_LIST, SHARDED_SLAB];

/// Into empty registries.
pub(crate) fn run_pair(plan: &Plan, report: &mut Report) {
    let ours = Owning::new();
    let (list, slab, sharded_list) = (MutexList::new(), MutexSlab::new(), ShardedList::new());
    let sharded_slab = ShardedSlab::new();
    let mut group = Group::new("add and remove an object");
    for &threads in &plan.threads {
        group = group
            .case(pair(&ours, OURS, threads))
            .case(pair(&list, LIST, threads))
            .case(pair(&slab, SLAB, threads))
            .case(pair(&sharded_list, SHARDED_LIST, threads))
            .case(pair(&sharded_slab, SHARDED_SLAB, threads));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
    report.against(&rounds, OURS, 1, &PEERS);
    report.against(&rounds, OURS, 2, &PEERS);
    report.record("L1.mutex_list", ratio(&rounds, OURS, LIST));
    report.record("L1.slab", ratio(&rounds, OURS, SLAB));
    report.record("L1.tokio_like", ratio(&rounds, OURS, SHARDED_LIST));
    report.record("L1.sharded_slab", ratio(&rounds, OURS, SHARDED_SLAB));

    report.record("L2.scale", rounds.tput_ratio(&two(OURS), &one(OURS)));
    let best = rounds.tput_ratio_to_best(&two(OURS), &[&two(LIST), &two(SLAB)]);
    report.record("L2.best_mutex_2t", best.map(|ratio| ratio.map(|times| 1.0 / times)));
    for name in [OURS, LIST, SLAB, SHARDED_LIST, SHARDED_SLAB] {
        let scale = rounds.tput_ratio(&two(name), &one(name));
        println!(
            "- {name}, two threads over one: {:.3}",
            scale.map_or(f64::NAN, |scale| scale.median)
        );
    }
}

/// Beside 100,000 objects that stay.
pub(crate) fn run_live(plan: &Plan, report: &mut Report) {
    let (ours, list, slab) = (Owning::new(), MutexList::new(), MutexSlab::new());
    let (sharded_list, sharded_slab) = (ShardedList::new(), ShardedSlab::new());
    let _ours = Entries::new(&ours, 1000, LIVE);
    let _list = Entries::new(&list, 1000, LIVE);
    let _slab = Entries::new(&slab, 1000, LIVE);
    let _sharded_list = Entries::new(&sharded_list, 1000, LIVE);
    let _sharded_slab = Entries::new(&sharded_slab, 1000, LIVE);
    let mut group = Group::new("add and remove, 100 k live");
    for threads in [1, 2] {
        group = group
            .case(pair(&ours, OURS, threads))
            .case(pair(&list, LIST, threads))
            .case(pair(&slab, SLAB, threads))
            .case(pair(&sharded_list, SHARDED_LIST, threads))
            .case(pair(&sharded_slab, SHARDED_SLAB, threads));
    }
    let rounds = group.run(plan);
    show(report, &rounds);
    report.record("L8.live100k.slab", ratio(&rounds, OURS, SLAB));
}

/// A pair while another CPU walks the same list all the time, and while it walks another list.
pub(crate) fn run_beside(plan: &Plan, report: &mut Report) {
    const BESIDE: &str = "PerCpuList, walked meanwhile";
    let (alone, walked, stop) = (Owning::new(), Owning::new(), AtomicBool::new(false));
    let _alone = Entries::new(&alone, 1000, 1000);
    let _walked = Entries::new(&walked, 1000, 1000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if let Some(cpu) = harness::allowed_cpus().ok().and_then(|cpus| cpus.last().copied()) {
                let _ = harness::pin(cpu);
            }
            // Ordering: Relaxed; the end of the scope waits for the thread.
            while !stop.load(Ordering::Relaxed) {
                black_box(walked.0.iter().map(|value| *value).sum::<u64>());
            }
        });
        let group = Group::new("add and remove an object while a CPU walks");
        let rounds = group.case(pair(&alone, OURS, 1)).case(pair(&walked, BESIDE, 1)).run(plan);
        stop.store(true, Ordering::Relaxed);
        report.show(&rounds);
        report.record("L9.pair_beside_walk.alone", ratio(&rounds, BESIDE, OURS));
    });
}

/// The memory of a list of 100,000 numbers.
pub(crate) fn run_bytes(_: &Plan, report: &mut Report) {
    // SAFETY: takes no arguments and only reads the state of the allocator.
    let used = || unsafe { libc::mallinfo2() }.uordblks;
    let list = Owning::new();
    let before = used();
    let mut entries = Vec::with_capacity(LIVE);
    let vector = used() - before;
    entries.extend((0..LIVE as u64).map(|n| list.add(&n)));
    let each = (used() - before - vector) as f64 / LIVE as f64;
    println!("- a number on the list takes {each:.1} bytes");
    report.record("L9.bytes_per_entry@8", Some(each));
}

fn show(report: &mut Report, rounds: &Rounds) {
    report.show(rounds);
    for threads in [1, 2] {
        report.against(rounds, OURS, threads, &PEERS);
    }
}

/// Values that the registry owns.
pub(crate) fn run_owning(plan: &Plan, report: &mut Report) {
    let (ours, dashmap, sharded_slab) = (Owning::new(), Dash::new(), ShardedSlab::new());
    let mut group = Group::new("insert and remove a value");
    for threads in [1, 2] {
        group = group
            .case(pair(&ours, OURS, threads))
            .case(pair(&dashmap, DASHMAP, threads))
            .case(pair(&sharded_slab, SHARDED_SLAB, threads));
    }
    let rounds = group.run(plan);
    report.show(&rounds);
    for threads in [1, 2] {
        report.against(&rounds, OURS, threads, &[DASHMAP, SHARDED_SLAB]);
    }
    report.record("L5.dashmap", ratio(&rounds, OURS, DASHMAP));
    report.record("L5.sharded_slab", ratio(&rounds, OURS, SHARDED_SLAB));
}

fn one(name: &str) -> String {
    format!("{name}/1")
}

fn two(name: &str) -> String {
    format!("{name}/2")
}

fn ratio(rounds: &Rounds, ours: &str, peer: &str) -> Option<Ratio> {
    rounds.time_ratio(&one(ours), &one(peer))
}
