//! radix-ctx, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench radix_ctx_ops             all groups
//! cargo bench --bench radix_ctx_ops -- insert   one group
//! ```
//!
//! One thread, on one CPU, 512 contexts of 56 bytes. The rows that decide a target, those with two
//! threads and those with more contexts are in `cargo bench --bench radix_ctx`.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dashmap::DashMap;
use offlock_percpu::rcu;
use parking_lot::RwLock;
use radix_ctx::{CtxTable, Id};
use rustc_hash::FxBuildHasher;
use scc::HashIndex;
use sharded_slab::Slab;
use thunderdome::{Arena, Index};

type Value = [u64; 7];
type Papaya<V> = papaya::HashMap<u64, V, FxBuildHasher>;

const CONTEXTS: u64 = 512;

/// Why no table is full.
const ROOM: &str = "memory for a context, and no limit";
/// Why every lookup finds its context.
const THERE: &str = "no thread removed it";

fn value(n: u64) -> Value {
    [n; 7]
}

/// 0 to 511 in an order that no prefetcher follows.
fn mixed() -> impl Iterator<Item = usize> + Clone {
    (0..CONTEXTS as usize).map(|n| (n * 197 + 31) % CONTEXTS as usize).cycle()
}

/// One row: `operation` over and over, called `name` with one thread.
macro_rules! row {
    ($group:ident, $name:literal, $operation:expr) => {
        $group.bench_function(BenchmarkId::new($name, 1), |b| b.iter(|| $operation));
    };
}

/// Looking an id up, with a guard per lookup where there are guards.
fn get(c: &mut Criterion) {
    let table = CtxTable::new();
    let ids: Vec<Id> = (0..CONTEXTS).map(|n| table.insert(value(n)).expect(ROOM)).collect();
    let papaya = Papaya::with_hasher(FxBuildHasher);
    let index = HashIndex::with_hasher(FxBuildHasher);
    let dashmap = DashMap::with_hasher(FxBuildHasher);
    for n in 0..CONTEXTS {
        papaya.pin().insert(n, value(n));
        index.insert_sync(n, value(n)).expect("a new key");
        dashmap.insert(n, value(n));
    }
    let slab = Slab::new();
    let keys: Vec<usize> = (0..CONTEXTS).map(|n| slab.insert(value(n)).expect(ROOM)).collect();
    let mut arena = Arena::new();
    let indexes: Vec<Index> = (0..CONTEXTS).map(|n| arena.insert(value(n))).collect();
    let arena = RwLock::new(arena);

    let mut next = mixed();
    let mut at = || next.next().expect("it is endless");
    let mut group = c.benchmark_group("get");
    row!(group, "radix-ctx", table.with(ids[at()], |value| value[0]).expect(THERE));
    row!(group, "papaya", papaya.pin().get(&(at() as u64)).expect(THERE)[0]);
    row!(group, "scc-hash-index", index.peek_with(&(at() as u64), |_, v| v[0]).expect(THERE));
    row!(group, "dashmap", dashmap.get(&(at() as u64)).expect(THERE)[0]);
    row!(group, "sharded-slab", slab.get(keys[at()]).expect(THERE)[0]);
    row!(group, "rwlock-arena", arena.read().get(indexes[at()]).expect(THERE)[0]);
    group.finish();
}

/// Looking an id up, taking a counted reference, dropping it.
fn reference(c: &mut Criterion) {
    let table = CtxTable::new();
    let ids: Vec<Id> = (0..CONTEXTS).map(|n| table.insert(value(n)).expect(ROOM)).collect();
    let arcs = CtxTable::new();
    let arc_ids: Vec<Id> =
        (0..CONTEXTS).map(|n| arcs.insert(Arc::new(value(n))).expect(ROOM)).collect();
    let papaya = Papaya::with_hasher(FxBuildHasher);
    let dashmap = DashMap::with_hasher(FxBuildHasher);
    for n in 0..CONTEXTS {
        papaya.pin().insert(n, Arc::new(value(n)));
        dashmap.insert(n, Arc::new(value(n)));
    }

    let mut next = mixed();
    let mut at = || next.next().expect("it is endless");
    let mut group = c.benchmark_group("get_ref");
    row!(group, "radix-ctx", drop(black_box(table.get_ref(ids[at()]).expect(THERE))));
    row!(group, "radix-ctx-arc", arcs.with(arc_ids[at()], Arc::clone).expect(THERE));
    row!(group, "papaya-arc", Arc::clone(papaya.pin().get(&(at() as u64)).expect(THERE)));
    row!(group, "dashmap-arc", Arc::clone(&dashmap.get(&(at() as u64)).expect(THERE)));
    group.finish();
}

/// Inserting a context and removing it, with all that this costs by the by.
fn insert(c: &mut Criterion) {
    let table = CtxTable::new();
    let papaya = Papaya::with_hasher(FxBuildHasher);
    let index = HashIndex::with_hasher(FxBuildHasher);
    let dashmap = DashMap::with_hasher(FxBuildHasher);
    let slab = Slab::new();
    let arena = RwLock::new(Arena::new());
    let mut n = 0;
    let mut key = || {
        n += 1;
        n
    };
    let mut group = c.benchmark_group("insert_remove");
    row!(group, "radix-ctx", {
        let id = table.insert(value(1)).expect(ROOM);
        assert!(table.remove(id).is_ok());
    });
    row!(group, "papaya", {
        let (key, map) = (key(), papaya.pin());
        map.insert(key, value(1));
        assert!(map.remove(&key).is_some());
    });
    row!(group, "scc-hash-index", {
        let key = key();
        index.insert_sync(key, value(1)).expect("a new key");
        assert!(index.remove_sync(&key));
    });
    row!(group, "dashmap", {
        let key = key();
        dashmap.insert(key, value(1));
        assert!(dashmap.remove(&key).is_some());
    });
    row!(group, "sharded-slab", {
        let key = slab.insert(value(1)).expect(ROOM);
        assert!(slab.remove(key));
    });
    row!(group, "rwlock-arena", {
        let index = arena.write().insert(value(1));
        let removed = arena.write().remove(index);
        assert!(removed.is_some());
    });
    group.finish();
}

/// Walking all contexts.
fn iterate(c: &mut Criterion) {
    let table = CtxTable::new();
    let papaya = Papaya::with_hasher(FxBuildHasher);
    let dashmap = DashMap::with_hasher(FxBuildHasher);
    for n in 0..CONTEXTS {
        table.insert(value(n)).expect(ROOM);
        papaya.pin().insert(n, value(n));
        dashmap.insert(n, value(n));
    }
    let mut group = c.benchmark_group("iterate");
    row!(group, "radix-ctx", table.iter(&rcu::pin()).map(|(_, value)| value[0]).sum::<u64>());
    row!(group, "papaya", papaya.pin().values().map(|value| value[0]).sum::<u64>());
    row!(group, "dashmap", dashmap.iter().map(|entry| entry.value()[0]).sum::<u64>());
    group.finish();
}

fn on_one_cpu() -> Criterion {
    harness::pin(harness::allowed_cpus().expect("CPUs")[0]).expect("an allowed CPU");
    eprintln!("percpu: {}", offlock_percpu::capabilities());
    Criterion::default()
}

criterion_group! {
    name = ops;
    config = on_one_cpu();
    targets = get, reference, insert, iterate
}
criterion_main!(ops);
