//! R5: looking an id up, taking a counted reference, and dropping it.
//!
//! The peers have no counted reference of their own (sharded-slab has): they keep an `Arc` of each
//! value and clone it under a guard that lives as long as the lookup.

use std::hint::black_box;
use std::sync::Arc;

use harness::{Case, Group, Plan, Report};

use crate::map::{Filled, Map, Value, order, value};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded};

const IDS: usize = 512;

const OURS: &str = "get_ref + drop";

/// The ids that are looked up.
#[derive(Clone, Copy, PartialEq)]
enum Ids {
    All,
    /// One, by every thread.
    Hot,
}

impl Ids {
    fn of<K: Copy>(self, keys: &[K]) -> Vec<K> {
        match self {
            Self::All => keys.to_vec(),
            Self::Hot => vec![keys[0]],
        }
    }
}

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let order = order(IDS);
    let arc = |n| Arc::new(value(n));
    let ours = Filled::<Ctx<Value>>::new(IDS, &order);
    let with_arc = Filled::<Ctx<Arc<Value>>, _>::with(IDS, &order, arc);
    let papaya = Filled::<Papaya<Arc<Value>>, _>::with(IDS, &order, arc);
    let index = Filled::<Index<Arc<Value>>, _>::with(IDS, &order, arc);
    let dashmap = Filled::<Dash<Arc<Value>>, _>::with(IDS, &order, arc);
    let sharded = Filled::<Sharded<Value>>::new(IDS, &order);

    let peers =
        ["radix-ctx + Arc", "papaya + Arc", "HashIndex + Arc", "dashmap + Arc", "sharded-slab get"];
    for ids in [Ids::All, Ids::Hot] {
        let name = if ids == Ids::All { "a reference, 512 ids" } else { "a reference, one hot id" };
        let mut group = Group::new(name);
        for threads in [1, 2] {
            group = group
                .case(case(OURS, threads, &ours.keys, ids, |key| {
                    black_box(&ours.map.get_ref(key).expect("it is there"));
                }))
                .case(arcs(&with_arc, threads, ids))
                .case(arcs(&papaya, threads, ids))
                .case(arcs(&index, threads, ids))
                .case(arcs(&dashmap, threads, ids))
                .case(case("sharded-slab get", threads, &sharded.keys, ids, |key| {
                    sharded.map.read(&(), key, |value| {
                        black_box(value);
                    });
                }));
        }
        let rounds = group.run(plan);
        report.show(&rounds);
        for threads in [1, 2] {
            report.against(&rounds, OURS, threads, &peers);
        }
        let (ours, papaya) = (|n| format!("{OURS}/{n}"), |n| format!("papaya + Arc/{n}"));
        match ids {
            Ids::All => report.record("R5.papaya_arc", rounds.time_ratio(&ours(1), &papaya(1))),
            Ids::Hot => {
                let hot = rounds.tput_ratio(&ours(2), &papaya(2));
                report.record("R5.papaya_arc_hot_2t.tput", hot);
            }
        }
    }
}

/// Clones the `Arc` found and drops the clone.
fn arcs<M: Map<Arc<Value>>>(filled: &Filled<M, Arc<Value>>, threads: usize, ids: Ids) -> Case<'_> {
    let name = format!("{} + Arc", M::NAME);
    case(&name, threads, &filled.keys, ids, |key| {
        let clone = filled.map.read(&filled.map.enter(), key, Arc::clone);
        black_box(&clone.expect("it is there"));
    })
}

fn case<'a, K: Copy + Sync + 'a>(
    name: &str,
    threads: usize,
    keys: &[K],
    ids: Ids,
    operation: impl Fn(K) + Sync + Copy + 'a,
) -> Case<'a> {
    let keys = ids.of(keys);
    Case::batched(name, threads, move |thread| {
        let keys = keys.clone();
        let mut at = thread * keys.len() / 2;
        move |ops| {
            for i in 0..ops as usize {
                operation(keys[(at + i) & (keys.len() - 1)]);
            }
            at += ops as usize;
        }
    })
}
