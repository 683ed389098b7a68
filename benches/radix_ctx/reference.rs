//! R5: looking an id up, taking a counted reference, and dropping it.
//!
//! The peers have no counted reference of their own (sharded-slab has): they keep an `Arc` of each
//! value and clone it under a guard that lives as long as the lookup.

use std::hint::black_box;
use std::sync::Arc;

use harness::{Case, Group, Plan, Report, two};

use crate::map::{Filled, Map, Value, order, value};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded};

const IDS: usize = 512;

const OURS: &str = "get_ref + drop";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    for (hot, name) in [(false, "a reference, 512 ids"), (true, "a reference, one hot id")] {
        let rounds = group(name, hot).run(plan);
        report.compare(&rounds, &[OURS]);
        if hot {
            let ratio = rounds.tput_ratio(&two(OURS), "papaya + Arc/2");
            report.record("R5.papaya_arc_hot_2t.tput", ratio);
        } else {
            report.record("R5.papaya_arc", rounds.time_ratio(OURS, "papaya + Arc"));
        }
    }
}

/// Lookups of all ids, or of one by every thread.
fn group(name: &str, hot: bool) -> Group<'static> {
    let order = if hot { vec![0] } else { order(IDS) };
    let ours = Arc::new(Filled::<Ctx<Value>>::new(IDS, &order));
    let sharded = Arc::new(Filled::<Sharded<Value>>::new(IDS, &order));
    Group::new(name)
        .cases(cases(OURS, ours, |map, key| {
            black_box(&map.get_ref(key).expect("it is there"));
        }))
        .cases(arcs::<Ctx<Arc<Value>>>(&order))
        .cases(arcs::<Papaya<Arc<Value>>>(&order))
        .cases(arcs::<Index<Arc<Value>>>(&order))
        .cases(arcs::<Dash<Arc<Value>>>(&order))
        .cases(cases("sharded-slab get", sharded, |map, key| {
            map.read(&(), key, |value| {
                black_box(value);
            });
        }))
}

/// Clones the `Arc` found and drops the clone.
fn arcs<M: Map<Arc<Value>>>(order: &[u32]) -> [Case<'static>; 2] {
    let filled = Arc::new(Filled::<M, _>::with(IDS, order, |n| Arc::new(value(n))));
    cases(&format!("{} + Arc", M::NAME), filled, |map, key| {
        let clone = map.read(&map.enter(), key, Arc::clone);
        black_box(&clone.expect("it is there"));
    })
}

fn cases<V: Send + Sync + 'static, M: Map<V>>(
    name: &str,
    filled: Arc<Filled<M, V>>,
    operation: impl Fn(&M, M::Key) + Sync + Copy + 'static,
) -> [Case<'static>; 2] {
    [1, 2].map(|threads| {
        let filled = Arc::clone(&filled);
        Case::batched(name, threads, move |thread| {
            let filled = Arc::clone(&filled);
            let mut at = thread * filled.keys.len() / 2;
            move |ops| {
                for i in 0..ops as usize {
                    operation(&filled.map, filled.keys[(at + i) & (filled.keys.len() - 1)]);
                }
                at += ops as usize;
            }
        })
    })
}
