//! R8: walking all values, per entry. One word of each is added up; ours comes in the order of ids,
//! a hash map's in none.

use std::hint::black_box;

use harness::timed::{Row, measure};
use harness::{Plan, Report};

use crate::map::{Filled, Value, Walk, order};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Slots};

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    for (n, name) in [(512, "512"), (1 << 16, "64k"), (1 << 20, "1M")] {
        let order = order(n);
        let ours = Filled::<Ctx<Value>>::new(n, &order);
        let papaya = Filled::<Papaya<Value>>::new(n, &order);
        let index = Filled::<Index<Value>>::new(n, &order);
        let dashmap = Filled::<Dash<Value>>::new(n, &order);
        let slots = Filled::<Slots<Value>>::new(n, &order);
        let rows =
            vec![row(&ours, n), row(&papaya, n), row(&index, n), row(&dashmap, n), row(&slots, n)];
        let rounds = measure(&format!("walk, per entry of {name}"), plan, rows);
        report.show(&rounds);
        let peers = ["papaya", "HashIndex", "dashmap", "Vec<Slot>"];
        report.against(&rounds, "radix-ctx", 1, &peers);
        report.record(&format!("R8.papaya@{name}"), rounds.time_ratio("radix-ctx/1", "papaya/1"));
    }
}

/// A few walks in a row, and one before: the map is as warm as it can be.
fn row<M: Walk<Value>>(filled: &Filled<M>, n: usize) -> Row<'_> {
    let walks = (4096 / n).max(1);
    let walk = move || {
        let (mut sum, mut seen) = (0_u64, 0);
        filled.map.each(|value| {
            sum = sum.wrapping_add(value[0]);
            seen += 1;
        });
        assert_eq!((sum, seen), (n as u64 * (n as u64 - 1) / 2, n));
        black_box(sum);
    };
    let row = Row::new(M::NAME, move || {
        (0..walks).for_each(|_| walk());
        (walks * n) as u64
    });
    row.before(walk)
}
