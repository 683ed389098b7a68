//! R8: walking all values, per entry. One word of each is added up; ours comes in the order of ids,
//! a hash map's in none.

use std::hint::black_box;
use std::sync::Arc;

use harness::timed::{Row, measure};
use harness::{Plan, Report};

use crate::map::{Filled, Value, Walk, order};
use crate::ours::Ctx;
use crate::peers::{Dash, Index, Papaya, Slots};

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    for (n, name) in [(512, "512"), (1 << 16, "64k"), (1 << 20, "1M")] {
        let order = order(n);
        let rows = vec![
            row::<Ctx<Value>>(&order, n),
            row::<Papaya<Value>>(&order, n),
            row::<Index<Value>>(&order, n),
            row::<Dash<Value>>(&order, n),
            row::<Slots<Value>>(&order, n),
        ];
        let [rounds] = measure([&format!("walk, per entry of {name}")], plan, rows);
        report.compare(&rounds, &["radix-ctx"]);
        report.record(&format!("R8.papaya@{name}"), rounds.time_ratio("radix-ctx", "papaya"));
    }
}

/// A few walks in a row, and one before: the map is as warm as it can be.
fn row<M: Walk<Value>>(order: &[u32], n: usize) -> Row<'static> {
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
