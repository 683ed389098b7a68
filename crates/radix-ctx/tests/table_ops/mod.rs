//! A `CtxTable` and its model, a `BTreeMap`: each step changes both and compares them.
//!
//! One thread runs the steps. Each step without a guard flushes the table. While there is a guard, no context
//! that was removed under it is reclaimed. So it is always known which indexes are vacant.
//!
//! | module | contents |
//! |---|---|
//! | [`op`] | the steps and the limits of a table, decoded from bytes |
//! | [`canary`] | the contexts |
//! | [`both`] | the table and the map, and what a step changes in the map |
//! | [`step`] | each step |
//! | [`compare`] | comparisons |

mod both;
mod canary;
mod compare;
mod op;
mod step;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use radix_ctx::{CtxRef, Id};

use both::Both;
use canary::Canary;

pub(crate) use op::{Limits, Op};

/// Runs steps on a table, and returns their number.
///
/// # Panics
///
/// Panics if the result of an operation differs from that of the model.
pub(crate) fn run_ops(limits: Limits, ops: impl Iterator<Item = Op>) -> usize {
    let count = Arc::new(AtomicI64::new(0));
    let table = limits.build();
    let mut both = Both::new(&table, limits, &count);
    let steps = ops.map(|op| both.step(op)).count();
    let refs = both.end();
    drop(table);
    assert_eq!(count.load(Relaxed), referenced(&refs), "only references keep contexts");
    drop(refs);
    assert_eq!(count.load(Relaxed), 0, "a context was not dropped");
    steps
}

fn referenced(refs: &[CtxRef<Canary>]) -> i64 {
    let ids: std::collections::BTreeSet<Id> = refs.iter().map(CtxRef::id).collect();
    ids.len() as i64
}
