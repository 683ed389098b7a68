//! radix-ctx, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench radix_ctx_ops             all groups
//! cargo bench --bench radix_ctx_ops -- insert   one group
//! ```
//!
//! One thread, on one CPU, 512 contexts of 56 bytes. The rows that decide a target, those with two threads and
//! those with more contexts are in `cargo bench --bench radix_ctx`.

mod ops;

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use offlock_percpu::rcu;
use radix_ctx::{CtxTable, Id};
use rustc_hash::FxBuildHasher;

use self::ops::{on_one_cpu, row};

type Value = [u64; 7];

const CONTEXTS: u64 = 512;

/// The message of `expect`: no table is full.
const ROOM: &str = "memory for a context, and no limit";
/// The message of `expect`: every lookup finds its context.
const THERE: &str = "no thread removed it";

fn table() -> (CtxTable<Value>, Vec<Id>) {
    let table = CtxTable::new();
    let ids = (0..CONTEXTS).map(|n| table.insert([n; 7]).expect(ROOM)).collect();
    (table, ids)
}

/// The peer: papaya, with an `Arc` of each value.
fn map() -> papaya::HashMap<u64, Arc<Value>, FxBuildHasher> {
    let map = papaya::HashMap::with_hasher(FxBuildHasher);
    (0..CONTEXTS).for_each(|n| {
        map.pin().insert(n, Arc::new([n; 7]));
    });
    map
}

/// Looking an id up, with a guard for each lookup, and taking a counted reference.
fn get(c: &mut Criterion) {
    let ((table, ids), map) = (table(), map());
    // 0 to 511 in an order that no prefetcher follows.
    let mut order = (0..CONTEXTS as usize).map(|n| (n * 197 + 31) % CONTEXTS as usize).cycle();
    let mut at = || order.next().expect("it is endless");
    let mut group = c.benchmark_group("get");
    row!(group, "radix-ctx", table.with(ids[at()], |value| value[0]).expect(THERE));
    row!(group, "papaya", map.pin().get(&(at() as u64)).expect(THERE)[0]);
    row!(group, "radix-ctx-reference", drop(black_box(table.get_ref(ids[at()]).expect(THERE))));
    row!(group, "papaya-arc", Arc::clone(map.pin().get(&(at() as u64)).expect(THERE)));
    group.finish();
}

/// Inserting a context and removing it, with the grace periods and drops that this costs.
fn insert(c: &mut Criterion) {
    let ((table, _), map) = (table(), map());
    let mut group = c.benchmark_group("insert_remove");
    row!(group, "radix-ctx", {
        let id = table.insert([1; 7]).expect(ROOM);
        assert!(table.remove(id).is_ok());
    });
    let mut key = CONTEXTS;
    row!(group, "papaya", {
        key += 1;
        let map = map.pin();
        map.insert(key, Arc::new([1; 7]));
        assert!(map.remove(&key).is_some());
    });
    group.finish();
}

/// Walking all contexts.
fn iterate(c: &mut Criterion) {
    let ((table, _), map) = (table(), map());
    let mut group = c.benchmark_group("iterate");
    row!(group, "radix-ctx", table.iter(&rcu::pin()).map(|(_, value)| value[0]).sum::<u64>());
    row!(group, "papaya", map.pin().values().map(|value| value[0]).sum::<u64>());
    group.finish();
}

criterion_group! {
    name = groups;
    config = on_one_cpu();
    targets = get, insert, iterate
}
criterion_main!(groups);
