//! The per-CPU counter: adds against adds.

use offlock_percpu::{CpuId, PerCpuCounter};
use offlock_sync::virtual_cpu::{set_current, take_id};
use offlock_sync::{Arc, beside};

use super::{both_modes, model};

/// Two threads of one CPU, of which one moves.
#[test]
fn adds_of_one_cpu_lose_nothing() {
    both_modes(|| {
        let counter = Arc::new(PerCpuCounter::new());
        let other = beside(&counter, |counter| {
            counter.increment();
            set_current(CpuId::new(1));
            counter.add(-1);
        });
        counter.increment();
        counter.add(5);
        other.join().unwrap();
        assert_eq!(counter.sum(), 6);
    });
}

/// Two threads without an rseq id beside one that has: the words belong to sections alone, and the remote word
/// is shared.
#[test]
fn threads_without_an_id_stay_off_the_words() {
    model(|| {
        let counter = Arc::new(PerCpuCounter::new());
        let foreign = [(); 2].map(|()| {
            beside(&counter, |counter| {
                take_id();
                counter.increment();
            })
        });
        counter.increment();
        counter.increment();
        foreign.map(|thread| thread.join().unwrap());
        assert_eq!(counter.sum(), 4);
    });
}
