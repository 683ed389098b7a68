//! R1 to R4: looking ids up. 56-byte values; one word of the value found is added up.
//!
//! Each lookup has a guard of its own. Up to 64 k entries every row is a case of the harness's loop. A million values fit the last cache one map at a time: there
//! each window follows a walk over the row's own map in the order of its entries, and the two
//! threads of R4 run in a group of their own. What the machine itself loses with a second thread shows
//! in the row of the `Vec`, which shares nothing.

use std::sync::Arc;

use harness::timed::{Row, measure};
use harness::{Case, Group, Plan, Report, Rounds};

use crate::map::{Filled, Map, Value, order};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded, Slots};

const OURS: &str = <Ctx<Value> as Map<Value>>::NAME;
const PAPAYA: &str = <Papaya<Value> as Map<Value>>::NAME;
const INDEX: &str = <Index<Value> as Map<Value>>::NAME;
const DASHMAP: &str = <Dash<Value> as Map<Value>>::NAME;
const VEC: &str = <Slots<Value> as Map<Value>>::NAME;

/// A million lookups take their time: this many at once.
const MANY: u64 = 1 << 17;

pub(crate) fn run_512(plan: &Plan, report: &mut Report) {
    let rounds = small(plan, report, "get, 512 entries", 512);
    report.record("R1.hashindex@512", rounds.time_ratio(OURS, INDEX));
    report.record("R1.vecslot@512", rounds.time_ratio(OURS, VEC));
    report.record("R4.scale@512", rounds.scale(OURS));
}

pub(crate) fn run_64k(plan: &Plan, report: &mut Report) {
    let rounds = group(plan, report, "get, 64k entries", 1 << 16);
    record(report, &rounds, "R2");
    report.record("R4.scale@64k", rounds.scale(OURS));
}

pub(crate) fn run_1m(plan: &Plan, report: &mut Report) {
    let n = 1 << 20;
    let order = order(n);
    let ours = Arc::new(Filled::<Ctx<Value>>::new(n, &order));
    let slots = Arc::new(Filled::<Slots<Value>>::new(n, &order));
    let rows = vec![
        warm(Arc::clone(&ours)),
        warm(Arc::clone(&slots)),
        warm(Arc::new(Filled::<Papaya<Value>>::new(n, &order))),
        warm(Arc::new(Filled::<Index<Value>>::new(n, &order))),
        warm(Arc::new(Filled::<Dash<Value>>::new(n, &order))),
        warm(Arc::new(Filled::<Sharded<Value>>::new(n, &order))),
    ];
    let [rounds] = measure(["get, 1M entries"], plan, rows);
    report.compare(&rounds, &[OURS]);
    record(report, &rounds, "R3");

    let cases = [ours.case(1), ours.case(2), slots.case(1), slots.case(2)];
    let rounds = Group::new("get, 1M entries, two threads").cases(cases).run(plan);
    report.compare(&rounds, &[OURS]);
    report.record("R4.scale@1M", rounds.scale(OURS));
}

/// Rows of a table that the cache of a CPU holds.
pub(crate) fn small(plan: &Plan, report: &mut Report, name: &str, n: usize) -> Rounds {
    let rounds = group(plan, report, name, n);
    report.record(&format!("R1.papaya@{n}"), rounds.time_ratio(OURS, PAPAYA));
    rounds
}

fn record(report: &mut Report, rounds: &Rounds, id: &str) {
    let peers = [("papaya", PAPAYA), ("hashindex", INDEX), ("dashmap", DASHMAP), ("vecslot", VEC)];
    for (name, peer) in peers {
        report.record(&format!("{id}.{name}"), rounds.time_ratio(OURS, peer));
    }
}

fn group(plan: &Plan, report: &mut Report, name: &str, n: usize) -> Rounds {
    let order = order(n);
    let cases = [
        cases::<Ctx<Value>>(plan, &order, n),
        cases::<Slots<Value>>(plan, &order, n),
        cases::<Papaya<Value>>(plan, &order, n),
        cases::<Index<Value>>(plan, &order, n),
        cases::<Dash<Value>>(plan, &order, n),
        cases::<Sharded<Value>>(plan, &order, n),
    ];
    let rounds = Group::new(name).cases(cases.into_iter().flatten()).run(plan);
    report.compare(&rounds, &[OURS]);
    rounds
}

fn cases<M: Map<Value>>(plan: &Plan, order: &[u32], n: usize) -> Vec<Case<'static>> {
    let filled = Arc::new(Filled::<M>::new(n, order));
    plan.threads.iter().map(|&threads| filled.case(threads)).collect()
}

/// Lookups with a guard each, after a walk.
fn warm<M: Map<Value>>(filled: Arc<Filled<M>>) -> Row<'static> {
    let (mut at, walked) = (0, Arc::clone(&filled));
    let walk = move || walked.lookups(&walked.ascending, 0, walked.ascending.len() as u64);
    Row::after(M::NAME, walk, move || {
        filled.lookups(&filled.keys, at, MANY);
        at += MANY as usize;
        MANY
    })
}
