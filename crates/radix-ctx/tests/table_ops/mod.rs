//! What a `CtxTable` must do, by a `BTreeMap`: each step is done to both, and compared.
//!
//! One thread. After each step without a guard the table is flushed, and while there is a guard
//! nothing is reclaimed that was removed under it: so which indexes are vacant is always known.
//!
//! | module | what |
//! |---|---|
//! | [`op`] | the steps, and the limits of a table, from bytes |
//! | [`canary`] | the contexts |
//! | [`both`] | the table and the map, and what a step makes of the map |
//! | [`step`] | each step, done to both |
//! | [`compare`] | all that can be seen |

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

/// Runs steps on a table; returns their number.
///
/// # Panics
///
/// Panics if an operation's answer is not the model's.
pub(crate) fn run_ops(limits: Limits, ops: impl Iterator<Item = Op>) -> usize {
    let count = Arc::new(AtomicI64::new(0));
    let table = limits.build();
    let mut both = Both::new(&table, limits, &count);
    let steps = ops.map(|op| both.step(op)).count();
    let refs = both.end();
    drop(table);
    assert_eq!(count.load(Relaxed), referred(&refs), "only references keep contexts");
    drop(refs);
    assert_eq!(count.load(Relaxed), 0, "a context was lost");
    steps
}

fn referred(refs: &[CtxRef<Canary>]) -> i64 {
    let ids: std::collections::BTreeSet<Id> = refs.iter().map(CtxRef::id).collect();
    ids.len() as i64
}
