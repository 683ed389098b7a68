//! R1 to R4: looking ids up. 56-byte values; one word of the value found is added up.
//!
//! Each lookup has a guard of its own. Up to 64 k entries every row is a case of the harness's loop. A million values fit the last cache one map at a time: there
//! each window follows a walk over the row's own map in the order of its entries, and the two
//! threads of R4 run in a group of their own. What the machine itself loses with a second thread shows
//! in the row of the `Vec`, which shares nothing.

use harness::timed::{Row, measure};
use harness::{Group, Plan, Ratio, Report, Rounds};

use crate::map::{Filled, Map, Value, order};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded, Slots};

const OURS: &str = <Ctx<Value> as Map<Value>>::NAME;
const PAPAYA: &str = <Papaya<Value> as Map<Value>>::NAME;
const INDEX: &str = <Index<Value> as Map<Value>>::NAME;
const DASHMAP: &str = <Dash<Value> as Map<Value>>::NAME;
const VEC: &str = <Slots<Value> as Map<Value>>::NAME;
const PEERS: [&str; 5] = [PAPAYA, INDEX, DASHMAP, "sharded-slab", VEC];

/// A million lookups take their time: this many at once.
const MANY: u64 = 1 << 17;

pub(crate) fn run_1(plan: &Plan, report: &mut Report) {
    small(plan, report, 1);
}

pub(crate) fn run_16(plan: &Plan, report: &mut Report) {
    small(plan, report, 16);
}

pub(crate) fn run_512(plan: &Plan, report: &mut Report) {
    let rounds = small(plan, report, 512);
    report.record("R1.hashindex@512", ratio(&rounds, INDEX));
    report.record("R1.vecslot@512", ratio(&rounds, VEC));
    report.record("R4.scale@512", scale(&rounds, OURS));
}

pub(crate) fn run_64k(plan: &Plan, report: &mut Report) {
    let rounds = group(plan, "get, 64k entries", 1 << 16);
    show(report, &rounds);
    report.record("R2.papaya", ratio(&rounds, PAPAYA));
    report.record("R2.hashindex", ratio(&rounds, INDEX));
    report.record("R2.dashmap", ratio(&rounds, DASHMAP));
    report.record("R2.vecslot", ratio(&rounds, VEC));
    report.record("R4.scale@64k", scale(&rounds, OURS));
}

pub(crate) fn run_1m(plan: &Plan, report: &mut Report) {
    let n = 1 << 20;
    let order = order(n);
    let ours = Filled::<Ctx<Value>>::new(n, &order);
    let papaya = Filled::<Papaya<Value>>::new(n, &order);
    let index = Filled::<Index<Value>>::new(n, &order);
    let dashmap = Filled::<Dash<Value>>::new(n, &order);
    let sharded = Filled::<Sharded<Value>>::new(n, &order);
    let slots = Filled::<Slots<Value>>::new(n, &order);
    let mut rows = vec![warm(&ours), warm(&slots), warm(&papaya), warm(&index)];
    rows.extend([warm(&dashmap), warm(&sharded)]);
    let rounds = measure("get, 1M entries", plan, rows);
    report.show(&rounds);
    report.against(&rounds, OURS, 1, &PEERS);
    report.record("R3.papaya", ratio(&rounds, PAPAYA));
    report.record("R3.dashmap", ratio(&rounds, DASHMAP));
    report.record("R3.hashindex", ratio(&rounds, INDEX));
    report.record("R3.vecslot", ratio(&rounds, VEC));

    let group = Group::new("get, 1M entries, two threads");
    let rounds =
        group.case(ours.case(1)).case(ours.case(2)).case(slots.case(1)).case(slots.case(2));
    let rounds = rounds.run(plan);
    report.show(&rounds);
    show_scale(&rounds, &[OURS, VEC]);
    report.against(&rounds, OURS, 2, &[VEC]);
    report.record("R4.scale@1M", scale(&rounds, OURS));
}

/// Rows of a table that the cache of a CPU holds.
fn small(plan: &Plan, report: &mut Report, n: usize) -> Rounds {
    let noun = if n == 1 { "entry" } else { "entries" };
    let rounds = group(plan, &format!("get, {n} {noun}"), n);
    show(report, &rounds);
    report.record(&format!("R1.papaya@{n}"), ratio(&rounds, PAPAYA));
    rounds
}

fn group(plan: &Plan, name: &str, n: usize) -> Rounds {
    let order = order(n);
    let ours = Filled::<Ctx<Value>>::new(n, &order);
    let papaya = Filled::<Papaya<Value>>::new(n, &order);
    let index = Filled::<Index<Value>>::new(n, &order);
    let dashmap = Filled::<Dash<Value>>::new(n, &order);
    let sharded = Filled::<Sharded<Value>>::new(n, &order);
    let slots = Filled::<Slots<Value>>::new(n, &order);
    let mut group = Group::new(name);
    for &threads in &plan.threads {
        group = group.case(ours.case(threads)).case(slots.case(threads)).case(papaya.case(threads));
        group = group.case(index.case(threads)).case(dashmap.case(threads));
        group = group.case(sharded.case(threads));
    }
    group.run(plan)
}

fn show(report: &mut Report, rounds: &Rounds) {
    report.show(rounds);
    show_scale(rounds, &[OURS, PAPAYA, INDEX, VEC]);
    report.against(rounds, OURS, 1, &PEERS);
    report.against(rounds, OURS, 2, &PEERS);
}

fn ratio(rounds: &Rounds, peer: &str) -> Option<Ratio> {
    rounds.time_ratio(&format!("{OURS}/1"), &format!("{peer}/1"))
}

fn scale(rounds: &Rounds, name: &str) -> Option<Ratio> {
    rounds.tput_ratio(&format!("{name}/2"), &format!("{name}/1"))
}

fn show_scale(rounds: &Rounds, names: &[&str]) {
    for name in names {
        let scale = scale(rounds, name).map_or(f64::NAN, |scale| scale.median);
        println!("- {name}, two threads over one: {scale:.3}");
    }
}

/// Lookups with a guard each, after a walk.
fn warm<M: Map<Value>>(filled: &Filled<M>) -> Row<'_> {
    let mut at = 0;
    let row = Row::new(M::NAME, move || {
        filled.lookups(&filled.keys, at, MANY);
        at += MANY as usize;
        MANY
    });
    row.before(|| walk(filled))
}

fn walk<M: Map<Value>>(filled: &Filled<M>) {
    filled.lookups_held(&filled.ascending, 0, filled.ascending.len() as u64);
}
