//! percpu-list, operation by operation, with criterion's report in `target/criterion`.
//!
//! ```text
//! cargo bench --bench percpu_list_ops           all groups
//! cargo bench --bench percpu_list_ops -- walk   one group
//! ```
//!
//! One thread, on one CPU. The rows that decide a target, those with two threads and those with entries in
//! random order are in `cargo bench --bench percpu_list`.

mod ops;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use parking_lot::Mutex;
use percpu_list::PerCpuList;
use slab::Slab;

use self::ops::{on_one_cpu, row};

const ENTRIES: u64 = 1000;

/// The message of `expect`: no call is refused.
const FREE: &str = "there is memory, and this thread has nothing locked";

/// Adding an entry and removing it.
fn add(c: &mut Criterion) {
    let (list, slab) = (PerCpuList::new(), Mutex::new(Slab::new()));
    let mut group = c.benchmark_group("add_remove");
    row!(group, "percpu-list", drop(black_box(list.insert(1_u64).expect(FREE))));
    row!(group, "mutex-slab", {
        let key = slab.lock().insert(1_u64);
        slab.lock().remove(black_box(key))
    });
    group.finish();
}

/// Walking all entries, and locking all slots.
fn walk(c: &mut Criterion) {
    let list = PerCpuList::new();
    let _entries: Vec<_> = (0..ENTRIES).map(|n| list.insert(n).expect(FREE)).collect();
    let slab: Slab<u64> = (0..ENTRIES).map(|n| (n as usize, n)).collect();
    let (slab, empty) = (Mutex::new(slab), PerCpuList::<u64>::new());
    let mut group = c.benchmark_group("walk");
    row!(group, "percpu-list", list.iter().map(|n| *n).sum::<u64>());
    row!(group, "percpu-list-snapshot", list.lock_all().expect(FREE).iter().sum::<u64>());
    row!(group, "mutex-slab", slab.lock().iter().map(|(_, number)| number).sum::<u64>());
    row!(group, "lock_all-empty", drop(black_box(empty.lock_all().expect(FREE))));
    group.finish();
}

criterion_group! {
    name = groups;
    config = on_one_cpu();
    targets = add, walk
}
criterion_main!(groups);
