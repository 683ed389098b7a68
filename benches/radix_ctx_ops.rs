//! radix-ctx, operation by operation, with criterion's report in `target/criterion`:
//! `cargo bench --bench radix_ctx_ops -- insert`. 512 contexts of 56 bytes. The rows that decide a target are in
//! `radix_ctx`.

mod ops;

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use offlock_percpu::rcu;
use radix_ctx::{CtxTable, Id};
use rustc_hash::FxBuildHasher;

const CONTEXTS: u64 = 512;

/// The message of `expect`: no table is full.
const ROOM: &str = "memory for a context, and no limit";
/// The message of `expect`: every lookup finds its context.
const THERE: &str = "no thread removed it";

fn all(c: &mut Criterion) {
    let table = CtxTable::new();
    let insert = |n| table.insert([n; 7]).expect(ROOM);
    let ids: Vec<Id> = (0..CONTEXTS).map(insert).collect();
    // The peer: papaya, with an `Arc` of each value.
    let map = papaya::HashMap::with_hasher(FxBuildHasher);
    for n in 0..CONTEXTS {
        map.pin().insert(n, Arc::new([n; 7]));
    }
    // 0 to 511 in an order that no prefetcher follows. Each lookup has a guard.
    let mut order = (0..CONTEXTS as usize).map(|n| (n * 197 + 31) % CONTEXTS as usize).cycle();
    let mut at = || order.next().expect("it is endless");
    ops::group!(c, "get",
        "radix-ctx" => table.with(ids[at()], |value| value[0]).expect(THERE),
        "papaya" => map.pin().get(&(at() as u64)).expect(THERE)[0],
        "radix-ctx-reference" => drop(black_box(table.get_ref(ids[at()]).expect(THERE))),
        "papaya-arc" => Arc::clone(map.pin().get(&(at() as u64)).expect(THERE)),
    );
    ops::group!(c, "iterate",
        "radix-ctx" => table.iter(&rcu::pin()).map(|(_, value)| value[0]).sum::<u64>(),
        "papaya" => map.pin().values().map(|value| value[0]).sum::<u64>(),
    );
    // With the grace periods and drops that this costs.
    let mut key = CONTEXTS;
    ops::group!(c, "insert_remove",
        "radix-ctx" => assert!(table.remove(insert(1)).is_ok()),
        "papaya" => {
            key += 1;
            let map = map.pin();
            map.insert(key, Arc::new([1; 7]));
            assert!(map.remove(&key).is_some());
        },
    );
}

criterion_group! { name = groups; config = ops::on_one_cpu(); targets = all }
criterion_main!(groups);
