//! R6: removing, and inserting into the slots that became free.
//!
//! 64 k entries are there. 4,096 of them, in random order, are removed; as many are inserted;
//! and so on. Each stretch is timed by itself. In it is all that its operations cost: for the table
//! here the grace periods, the drops and the freeing of slots, which happen inside some calls to
//! `remove` and `insert` and are not called for otherwise; for the peers whatever they do at such
//! times. A hash map gets the very keys back that were removed: it meets its own tombstones.

use std::hint::black_box;

use harness::timed::{Clock, least_disturbed, on_one_cpu, repeat};
use harness::{Plan, Random, Report, Rounds};

use crate::map::{Change, Value, value};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded};

const ENTRIES: usize = 1 << 16;
const STRETCH: usize = 1 << 12;

/// Removes and inserts a stretch; both clocks run on.
type Turn<'a> = Box<dyn FnMut(&mut Clock, &mut Clock) + 'a>;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let order = Random::new(6).permutation(ENTRIES);
    let mut turns: Vec<(&str, Turn<'_>)> = vec![
        turn::<Ctx<Value>>(&order),
        turn::<Sharded<Value>>(&order),
        turn::<Papaya<Value>>(&order),
        turn::<Index<Value>>(&order),
        turn::<Dash<Value>>(&order),
    ];
    let names: Vec<&str> = turns.iter().map(|(name, _)| *name).collect();
    let rows = || names.iter().map(|name| (format!("{name}/1"), 1));
    let mut removals = Rounds::new("remove, 64k entries", rows());
    let mut inserts = Rounds::new("insert into freed slots", rows());
    on_one_cpu(|| {
        repeat(plan, || {
            let mut found = vec![None; turns.len()];
            removals.round(plan.retries, |index| {
                let (mut removal, mut insert) = (Clock::default(), Clock::default());
                let turn = &mut turns[index].1;
                let removed = least_disturbed(plan, || {
                    (removal, insert) = (Clock::default(), Clock::default());
                    while removal.wall + insert.wall < 2 * plan.window {
                        turn(&mut removal, &mut insert);
                    }
                    removal.window()
                });
                found[index] = Some(insert.window().throughput());
                removed
            });
            inserts.round(0, |index| found[index]);
        });
    });

    let ours = names[0];
    for rounds in [&removals, &inserts] {
        report.compare(rounds, &[ours]);
    }
    for (what, rounds) in [("insert", &inserts), ("remove", &removals)] {
        for (id, peer) in [("sharded_slab", "sharded-slab"), ("papaya", "papaya")] {
            report.record(&format!("R6.{what}.{id}"), rounds.time_ratio(ours, peer));
        }
    }
}

fn turn<'a, M: Change<Value> + 'a>(order: &'a [u32]) -> (&'static str, Turn<'a>) {
    let (map, mut keys) = M::filled(ENTRIES, value);
    let mut stretches = order.chunks_exact(STRETCH).cycle();
    let turn = move |removal: &mut Clock, insert: &mut Clock| {
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
    };
    (M::NAME, Box::new(turn))
}
