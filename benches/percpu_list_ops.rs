//! percpu-list, operation by operation, with criterion's report in `target/criterion`:
//! `cargo bench --bench percpu_list_ops -- walk`. The rows that decide a target are in `percpu_list`.

mod ops;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use parking_lot::Mutex;
use percpu_list::PerCpuList;
use slab::Slab;

/// The message of `expect`: no call is refused.
const FREE: &str = "there is memory, and this thread has nothing locked";

fn all(c: &mut Criterion) {
    let (list, slab) = (PerCpuList::new(), Mutex::new(Slab::new()));
    ops::group!(c, "add_remove",
        "percpu-list" => drop(black_box(list.insert(1_u64).expect(FREE))),
        "mutex-slab" => {
            let key = slab.lock().insert(1_u64);
            slab.lock().remove(black_box(key))
        },
    );
    let _entries: Vec<_> = (0..1000).map(|n| list.insert(n).expect(FREE)).collect();
    *slab.lock() = (0..1000).map(|n| (n, n as u64)).collect();
    ops::group!(c, "walk",
        "percpu-list" => list.iter().map(|n| *n).sum::<u64>(),
        "percpu-list-snapshot" => list.lock_all().expect(FREE).iter().sum::<u64>(),
        "mutex-slab" => slab.lock().iter().map(|(_, number)| number).sum::<u64>(),
    );
}

criterion_group! { name = groups; config = ops::on_one_cpu(); targets = all }
criterion_main!(groups);
