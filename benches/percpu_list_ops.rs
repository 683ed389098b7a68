//! percpu-list, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench percpu_list_ops           all groups
//! cargo bench --bench percpu_list_ops -- walk   one group
//! ```
//!
//! One thread, on one CPU. The rows that decide a target, those with two threads and those with
//! entries in random order are in `cargo bench --bench percpu_list`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dashmap::DashMap;
use parking_lot::Mutex;
use percpu_list::PerCpuList;
use rustc_hash::FxBuildHasher;
use slab::Slab;

const ENTRIES: u64 = 1000;

/// Why nothing is refused.
const FREE: &str = "there is memory, and this thread has nothing locked";

/// One row: `operation` over and over, called `name` with one thread.
macro_rules! row {
    ($group:ident, $name:literal, $operation:expr) => {
        $group.bench_function(BenchmarkId::new($name, 1), |b| b.iter(|| $operation));
    };
}

/// Adding an entry and removing it.
fn add(c: &mut Criterion) {
    let owning = PerCpuList::new();
    let slab = Mutex::new(Slab::new());
    let sharded = sharded_slab::Slab::new();
    let dashmap = DashMap::with_hasher(FxBuildHasher);
    let mut group = c.benchmark_group("add_remove");
    row!(group, "owning", drop(black_box(owning.insert(1_u64).expect(FREE))));
    row!(group, "mutex-slab", {
        let key = slab.lock().insert(1_u64);
        slab.lock().remove(black_box(key))
    });
    row!(group, "sharded-slab", {
        let key = sharded.insert(1_u64).expect("far below its limit");
        assert!(sharded.remove(black_box(key)));
    });
    row!(group, "dashmap", {
        dashmap.insert(1_u64, 1_u64);
        assert!(dashmap.remove(&1).is_some());
    });
    group.finish();
}

/// Walking all entries, and locking all slots.
fn walk(c: &mut Criterion) {
    let owning = PerCpuList::new();
    let _entries: Vec<_> = (0..ENTRIES).map(|n| owning.insert(n).expect(FREE)).collect();
    let mut slab = Slab::new();
    (0..ENTRIES).for_each(|number| {
        slab.insert(number);
    });
    let slab = Mutex::new(slab);
    let mut group = c.benchmark_group("walk");
    row!(group, "owning-unlocked", owning.iter().map(|n| *n).sum::<u64>());
    row!(group, "owning-snapshot", owning.lock_all().expect(FREE).iter().sum::<u64>());
    row!(group, "mutex-slab", slab.lock().iter().map(|(_, number)| number).sum::<u64>());
    group.finish();

    let empty = PerCpuList::<u64>::new();
    let mut group = c.benchmark_group("lock_all");
    row!(group, "owning", drop(black_box(empty.lock_all().expect(FREE))));
    row!(group, "mutex", drop(black_box(slab.lock())));
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
    targets = add, walk
}
criterion_main!(ops);
