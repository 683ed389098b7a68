//! L1, L2, L5, L8 and L9: an object is added, and removed where it was added.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness::{Case, Group, Plan, Report, two};

use crate::peers::{Dash, MutexList, MutexSlab, Owning, ShardedList, ShardedSlab};
use crate::registry::{Entries, LIVE, Registry};

const OURS: &str = Owning::NAME;

/// The rows of a registry in which so many objects stay.
type Rows = fn(threads: &[usize], live: usize) -> Vec<Case<'static>>;

const ALL: [Rows; 5] = [
    rows::<Owning>,
    rows::<MutexList>,
    rows::<MutexSlab>,
    rows::<ShardedList>,
    rows::<ShardedSlab>,
];

fn rows<R: Registry>(threads: &[usize], live: usize) -> Vec<Case<'static>> {
    let entries = Arc::new(Entries::<R>::new(1000, live));
    threads.iter().map(|&threads| pair(&entries, R::NAME, threads)).collect()
}

/// Adds an object and removes it, on each thread one of its own: the row `name/threads`.
fn pair<R: Registry>(entries: &Arc<Entries<R>>, name: &str, threads: usize) -> Case<'static> {
    let entries = Arc::clone(entries);
    Case::new(name, threads, move |thread| {
        let entries = Arc::clone(&entries);
        let object = R::Object::from(thread as u64);
        move |_| {
            let ticket = black_box(entries.registry.add(&object));
            assert!(entries.registry.remove(&object, ticket));
        }
    })
}

/// Into empty registries.
pub(crate) fn run_pair(plan: &Plan, report: &mut Report) {
    let cases = ALL.iter().flat_map(|rows| rows(&plan.threads, 0));
    let rounds = Group::new("add and remove an object").cases(cases).run(plan);
    report.compare(&rounds, &[OURS]);
    let peers = [
        ("mutex_list", MutexList::NAME),
        ("slab", MutexSlab::NAME),
        ("tokio_like", ShardedList::NAME),
        ("sharded_slab", ShardedSlab::NAME),
    ];
    for (id, peer) in peers {
        report.record(&format!("L1.{id}"), rounds.time_ratio(OURS, peer));
    }
    report.record("L2.scale", rounds.scale(OURS));
    let mutexes = [two(MutexList::NAME), two(MutexSlab::NAME)];
    let best = rounds.tput_ratio_to_best(&two(OURS), &mutexes.each_ref().map(String::as_str));
    report.record("L2.best_mutex_2t", best.map(|ratio| ratio.map(|times| 1.0 / times)));
}

/// Beside 100,000 objects that stay.
pub(crate) fn run_live(plan: &Plan, report: &mut Report) {
    let cases = ALL.iter().flat_map(|rows| rows(&[1, 2], LIVE));
    let rounds = Group::new("add and remove, 100 k live").cases(cases).run(plan);
    report.compare(&rounds, &[OURS]);
    report.record("L8.live100k.slab", rounds.time_ratio(OURS, MutexSlab::NAME));
}

/// Values that the registry owns.
pub(crate) fn run_owning(plan: &Plan, report: &mut Report) {
    let all: [Rows; 3] = [rows::<Owning>, rows::<Dash>, rows::<ShardedSlab>];
    let cases = all.iter().flat_map(|rows| rows(&[1, 2], 0));
    let rounds = Group::new("insert and remove a value").cases(cases).run(plan);
    report.compare(&rounds, &[OURS]);
    report.record("L5.dashmap", rounds.time_ratio(OURS, Dash::NAME));
    report.record("L5.sharded_slab", rounds.time_ratio(OURS, ShardedSlab::NAME));
}

/// A pair while another CPU walks the same list all the time, and while it walks another list.
pub(crate) fn run_beside(plan: &Plan, report: &mut Report) {
    const BESIDE: &str = "PerCpuList, walked meanwhile";
    let [alone, walked] = [(); 2].map(|()| Arc::new(Entries::<Owning>::new(1000, 1000)));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            harness::allowed_cpus().last().into_iter().for_each(|cpu| harness::pin(*cpu));
            // Ordering: Relaxed; the end of the scope waits for the thread.
            while !stop.load(Ordering::Relaxed) {
                black_box(walked.registry.0.iter().map(|value| *value).sum::<u64>());
            }
        });
        let group = Group::new("add and remove an object while a CPU walks");
        let rounds = group.case(pair(&alone, OURS, 1)).case(pair(&walked, BESIDE, 1)).run(plan);
        stop.store(true, Ordering::Relaxed);
        report.show(&rounds);
        report.record("L9.pair_beside_walk.alone", rounds.time_ratio(BESIDE, OURS));
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
