//! R12: the removal of 500 contexts together, against the removal of one, and of 500 one by one.
//!
//! A removal is measured from the call until the values are dropped. No other thread runs: a grace
//! period costs least then, and the 500 drops weigh most.

use harness::timed::{Row, measure};
use harness::{Plan, Report};

use crate::map::{Map, Value, value};
use crate::ours::Ctx;

const CONTEXTS: usize = 500;

const TOGETHER: &str = "remove_all of 500";
const ONE: &str = "remove and wait, one";
const ONE_BY_ONE: &str = "remove and wait, 500 times";

pub(crate) fn run(plan: &Plan, report: &mut Report) {
    let rows = vec![
        row(TOGETHER, CONTEXTS, together),
        row(ONE, 1, one_by_one),
        row(ONE_BY_ONE, CONTEXTS, one_by_one),
    ];
    let [quiet] = measure(["close, quiet"], plan, rows);
    report.compare(&quiet, &[TOGETHER]);
    report.record("R12.close_all_vs_one", quiet.time_ratio(TOGETHER, ONE));
}

/// An operation closes all that is in a table, which is made anew for each.
fn row(name: &str, contexts: usize, close: fn(&Ctx<Value>)) -> Row<'static> {
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
    let ids: Vec<_> = map.0.iter(&offlock_percpu::rcu::pin()).map(|(id, _)| id).collect();
    for id in ids {
        map.0.remove(id).expect("it is there").wait().expect(FREE);
    }
}
