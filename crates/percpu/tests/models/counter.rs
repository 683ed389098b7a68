//! The per-CPU counter: adds against adds.

use offlock_percpu::{CpuId, PerCpuCounter};
use offlock_sync::virtual_cpu::{set_current, take_id};
use offlock_sync::{Arc, thread};

use super::{both_modes, model};

const OTHER: CpuId = CpuId::new(1);

/// Two threads of one CPU, of which one moves.
#[test]
fn adds_of_one_cpu_lose_nothing() {
    both_modes(|| {
        let counter = Arc::new(PerCpuCounter::new());
        let other = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                counter.increment();
                set_current(OTHER);
                counter.add(-1);
            }
        });
        counter.increment();
        counter.add(5);
        other.join().unwrap();
        assert_eq!(counter.sum(), 6);
    });
}

/// A thread without an rseq id beside one that has: the words belong to sections alone.
#[test]
fn a_thread_without_an_id_stays_off_the_words() {
    model(|| {
        let counter = Arc::new(PerCpuCounter::new());
        let foreign = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                take_id();
                counter.increment();
            }
        });
        counter.increment();
        counter.increment();
        foreign.join().unwrap();
        assert_eq!(counter.sum(), 3);
    });
}
