//! L1, L2, L5, L8 and L9: an object is added, and removed where it was added. L6: all objects are walked.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness::timed::{Row, measure};
use harness::{Case, Group, Plan, Random, Report, two};

use crate::peers::{Dash, MutexList, MutexSlab, Owning, ShardedList, ShardedSlab};
use crate::registry::{Entries, LIVE, Registry, Walk};

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

const SNAPSHOT: &str = "PerCpuList, snapshot";
const UNLOCKED: &str = "PerCpuList, unlocked";
/// The message of `expect`: no call is refused.
const FREE: &str = "this thread has nothing locked";

/// L6: 100,000 entries walked.
///
/// The entries were added in the order in which they lie in memory, and then each was removed and
/// added again, in random order: so a list leads all over the memory. Every walk reads a word of
/// each object, and holds the lock all the way unless its row says otherwise.
pub(crate) fn run_walk(plan: &Plan, report: &mut Report) {
    let ours = shuffled::<Owning>();
    let list = &ours.registry.0;
    let rows = vec![
        walk_locked::<Owning>(),
        walk_locked::<MutexSlab>(),
        walk(SNAPSHOT, || list.lock_all().expect(FREE).iter().sum()),
        walk(UNLOCKED, || list.iter().map(|value| *value).sum()),
    ];
    let [rounds] = measure(["walk 100 k entries, per entry"], plan, rows);
    report.compare(&rounds, &[OURS, SNAPSHOT, UNLOCKED]);
    report.record("L6.lock_all_walk.slab", rounds.time_ratio(OURS, MutexSlab::NAME));
    report.record("L6.iter.slab", rounds.time_ratio(UNLOCKED, MutexSlab::NAME));
}

fn shuffled<R: Registry>() -> Entries<R> {
    let mut entries = Entries::new(0, LIVE);
    for at in Random::new(1).permutation(LIVE) {
        entries.renew(at as usize);
    }
    entries
}

fn walk_locked<R: Walk>() -> Row<'static> {
    let entries = shuffled::<R>();
    walk(R::NAME, move || {
        let mut sum = 0;
        entries.registry.each(|number| sum += number);
        sum
    })
}

/// A walk that adds up the numbers of all objects.
fn walk<'a>(name: &str, walk: impl Fn() -> u64 + 'a) -> Row<'a> {
    Row::new(name, move || {
        assert_eq!(walk(), (0..LIVE as u64).sum::<u64>(), "the entries");
        LIVE as u64
    })
}
