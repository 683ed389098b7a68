//! R6, R8, R9 and R12: changes, walks, memory, and removals of all contexts.

use std::hint::black_box;
use std::sync::Arc;

use harness::timed::{Row, measure};
use harness::{Plan, Random, Report};
use offlock_percpu::rcu;
use radix_ctx::CtxTable;
use testkit::alloc::{CountingAllocator, counted};

use crate::map::{Change, Filled, Map, Value, Walk, order, value};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded, Slots};

/// Costs a load and a branch that is always the same, except while `counted` runs.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const ENTRIES: usize = 1 << 16;
const STRETCH: usize = 1 << 12;

/// R6: removing, and inserting into the slots that became free.
///
/// 64 k entries are there. 4,096 of them, in random order, are removed; as many are inserted;
/// and so on. Each stretch is timed by itself. In it is all that its operations cost: for the table
/// here the grace periods, the drops and the freeing of slots, which happen inside some calls to
/// `remove` and `insert` and are not called for otherwise; for the peers whatever they do at such
/// times. A hash map gets the very keys back that were removed: it meets its own tombstones.
pub(crate) fn run_write(plan: &Plan, report: &mut Report) {
    let order = Random::new(6).permutation(ENTRIES);
    let rows = vec![
        stretches_of::<Ctx<Value>>(&order),
        stretches_of::<Sharded<Value>>(&order),
        stretches_of::<Papaya<Value>>(&order),
        stretches_of::<Index<Value>>(&order),
        stretches_of::<Dash<Value>>(&order),
    ];
    let groups = ["remove, 64k entries", "insert into freed slots"];
    let [removals, inserts] = measure(groups, plan, rows);
    for rounds in [&removals, &inserts] {
        report.compare(rounds, &["radix-ctx"]);
    }
    for (what, rounds) in [("insert", &inserts), ("remove", &removals)] {
        for (id, peer) in [("sharded_slab", "sharded-slab"), ("papaya", "papaya")] {
            report.record(&format!("R6.{what}.{id}"), rounds.time_ratio("radix-ctx", peer));
        }
    }
}

/// Removes and inserts a stretch, and so on.
fn stretches_of<'a, M: Change<Value> + 'a>(order: &'a [u32]) -> Row<'a, 2> {
    let (map, mut keys) = M::filled(ENTRIES, value);
    let mut stretches = order.chunks_exact(STRETCH).cycle();
    Row::clocked(
        M::NAME,
        || (),
        move |[removal, insert]| {
            let stretch = stretches.next().expect("it is endless");
            removal.add(|| {
                for at in stretch {
                    assert!(map.remove(black_box(keys[*at as usize])));
                }
                STRETCH as u64
            });
            insert.add(|| {
                for at in stretch {
                    keys[*at as usize] = map.insert(u64::from(*at), value(u64::from(*at)));
                }
                STRETCH as u64
            });
        },
    )
}

/// R8: walking all values, per entry. One word of each is added up; ours comes in the order of ids,
/// a hash map's in none.
pub(crate) fn run_walk(plan: &Plan, report: &mut Report) {
    for (n, name) in [(512, "512"), (1 << 16, "64k"), (1 << 20, "1M")] {
        let order = order(n);
        let rows = vec![
            walks_of::<Ctx<Value>>(&order, n),
            walks_of::<Papaya<Value>>(&order, n),
            walks_of::<Index<Value>>(&order, n),
            walks_of::<Dash<Value>>(&order, n),
            walks_of::<Slots<Value>>(&order, n),
        ];
        let [rounds] = measure([&format!("walk, per entry of {name}")], plan, rows);
        report.compare(&rounds, &["radix-ctx"]);
        report.record(&format!("R8.papaya@{name}"), rounds.time_ratio("radix-ctx", "papaya"));
    }
}

/// A few walks in a row, and one before: the map is as warm as it can be.
fn walks_of<M: Walk<Value>>(order: &[u32], n: usize) -> Row<'static> {
    let filled = Arc::new(Filled::<M>::new(n, order));
    let walks = (4096 / n).max(1);
    let walk = move |filled: &Filled<M>| {
        let (mut sum, mut seen) = (0_u64, 0);
        filled.map.each(|value| {
            sum = sum.wrapping_add(value[0]);
            seen += 1;
        });
        assert_eq!((sum, seen), (n as u64 * (n as u64 - 1) / 2, n));
        black_box(sum);
    };
    let walked = Arc::clone(&filled);
    Row::after(
        M::NAME,
        move || walk(&walked),
        move || {
            (0..walks).for_each(|_| walk(&filled));
            (walks * n) as u64
        },
    )
}

/// Bytes on the heap that `make` leaves allocated, and those of what it returns.
fn bytes<T>(make: impl FnOnce() -> T) -> f64 {
    let (made, heap) = counted(make);
    black_box(&made);
    heap.bytes as f64 + size_of::<T>() as f64
}

/// R9: bytes of the heap, by the layouts that were asked for.
pub(crate) fn run_memory(_plan: &Plan, report: &mut Report) {
    // What the first use costs a process is no table's: registrations, per-CPU memory.
    drop(rcu::pin());
    drop(Ctx::<Value>::filled(1, value));
    let entries = ENTRIES as f64;
    let small = bytes(|| Ctx::<u64>::filled(ENTRIES, |n| n).0) / entries;
    let large = bytes(|| Ctx::<Value>::filled(ENTRIES, value).0) / entries;
    let empty = bytes(CtxTable::<Value>::new);
    println!(
        "- an entry takes {small:.1} bytes with a u64, {large:.1} with [u64; 7]; none: {empty}"
    );
    report.record("R9.bytes_per_entry@64k", Some(small));
    report.record("R9.empty.bytes", Some(empty));
}

const CONTEXTS: usize = 500;

const TOGETHER: &str = "remove_all of 500";
const ONE: &str = "remove and wait, one";
const ONE_BY_ONE: &str = "remove and wait, 500 times";

/// R12: the removal of 500 contexts together, against the removal of one, and of 500 one by one.
///
/// A removal is measured from the call until the values are dropped. No other thread runs: a grace
/// period costs least then, and the 500 drops weigh most.
pub(crate) fn run_close(plan: &Plan, report: &mut Report) {
    let rows = vec![
        closing(TOGETHER, CONTEXTS, together),
        closing(ONE, 1, one_by_one),
        closing(ONE_BY_ONE, CONTEXTS, one_by_one),
    ];
    let [quiet] = measure(["close, quiet"], plan, rows);
    report.compare(&quiet, &[TOGETHER]);
    report.record("R12.close_all_vs_one", quiet.time_ratio(TOGETHER, ONE));
}

/// An operation closes all that is in a table, which is made anew for each.
fn closing(name: &str, contexts: usize, close: fn(&Ctx<Value>)) -> Row<'static> {
    Row::clocked(
        name,
        || (),
        move |[clock]| {
            let (map, _) = Ctx::filled(contexts, value);
            clock.add(|| {
                close(&map);
                1
            });
        },
    )
}

/// The message of `expect`: no wait is refused.
const FREE: &str = "no guard is held";

fn together(map: &Ctx<Value>) {
    map.0.remove_all().expect(FREE);
    assert!(map.0.is_empty());
}

fn one_by_one(map: &Ctx<Value>) {
    let ids: Vec<_> = map.0.iter(&rcu::pin()).map(|(id, _)| id).collect();
    for id in ids {
        map.0.remove(id).expect("it is there").wait().expect(FREE);
    }
}
