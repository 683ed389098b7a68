//! R6: removing, and inserting into the slots that became free.
//!
//! 64 k entries are there. 4,096 of them, in random order, are removed; as many are inserted;
//! and so on. Each stretch is timed by itself. In it is all that its operations cost: for the table
//! here the grace periods, the drops and the freeing of slots, which happen inside some calls to
//! `remove` and `insert` and are not called for otherwise; for the peers whatever they do at such
//! times. A hash map gets the very keys back that were removed: it meets its own tombstones.

use std::hint::black_box;

use harness::timed::{Row, measure};
use harness::{Plan, Random, Report};

use crate::map::{Change, Value, value};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Sharded};

const ENTRIES: usize = 1 << 16;
const STRETCH: usize = 1 << 12;

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let order = Random::new(6).permutation(ENTRIES);
    let rows = vec![
        row::<Ctx<Value>>(&order),
        row::<Sharded<Value>>(&order),
        row::<Papaya<Value>>(&order),
        row::<Index<Value>>(&order),
        row::<Dash<Value>>(&order),
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
fn row<'a, M: Change<Value> + 'a>(order: &'a [u32]) -> Row<'a, 2> {
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
