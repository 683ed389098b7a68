//! percpu, operation by operation, with criterion's report in `target/criterion`:
//! `cargo bench --bench percpu_ops -- current_cpu`. The rows that decide a target are in `percpu`.

mod ops;

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{Criterion, criterion_group, criterion_main};
use offlock_percpu::{LgLock, PerCpuCounter, PercpuRef, rcu};
use parking_lot::Mutex;

/// The message of `expect`: no lock is refused.
const FREE: &str = "no thread panics or locks twice";

fn all(c: &mut Criterion) {
    ops::group!(c, "current_cpu",
        "percpu" => black_box(offlock_percpu::current_cpu()),
        // SAFETY: the call takes no argument and reads no memory of ours.
        "sched_getcpu" => black_box(unsafe { libc::sched_getcpu() }),
    );
    let (ours, word) = (PerCpuCounter::new(), AtomicU64::new(0));
    ops::group!(c, "counter",
        "percpu" => ours.add(1),
        // Ordering: Relaxed; a counter, it publishes nothing.
        "fetch_add" => word.fetch_add(1, Ordering::Relaxed),
    );
    let (ours, arc) = (PercpuRef::new(|| {}), Arc::new(0_u64));
    ops::group!(c, "reference",
        "percpu" => drop(black_box(ours.try_get())),
        "arc" => drop(black_box(Arc::clone(&arc))),
    );
    let (ours, parking_lot) = (LgLock::new(|_| 0_u64), Mutex::new(0_u64));
    ops::group!(c, "lock",
        "percpu-local" => *ours.local().expect(FREE) += 1,
        "percpu-global" => drop(black_box(ours.global().expect(FREE))),
        "parking_lot" => *parking_lot.lock() += 1,
    );
    ops::group!(c, "pin",
        "percpu" => drop(black_box(rcu::pin())),
        "crossbeam-epoch" => drop(black_box(crossbeam_epoch::pin())),
    );
}

criterion_group! { name = groups; config = ops::on_one_cpu(); targets = all }
criterion_main!(groups);
