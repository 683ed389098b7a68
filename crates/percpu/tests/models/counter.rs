//! The per-CPU counter: adds against carries and folds.

use offlock_percpu::{CpuId, PerCpuCounter};
use offlock_sync::virtual_cpu::{set_current, take_id};
use offlock_sync::{Arc, thread};

use super::{both_modes, with_sections};

const CPU: [CpuId; 2] = [CpuId::new(0), CpuId::new(1)];

/// A counter whose words exist, so that a model is about one thing.
fn counter() -> Arc<PerCpuCounter> {
    let counter = PerCpuCounter::with_batch(2);
    counter.reserve().unwrap();
    Arc::new(counter)
}

/// Two adds that fill the batch of CPU 0 race with a fold of it. Fails if the fold takes the word
/// while a section is between its load and its store.
#[test]
fn inv13_a_fold_loses_no_add() {
    both_modes(|| {
        let counter = counter();
        counter.increment();
        let adder = thread::spawn({
            let counter = Arc::clone(&counter);
            move || (0..2).for_each(|_| counter.increment())
        });
        counter.fold(CPU[0]);
        adder.join().unwrap();
        assert_eq!(counter.sum(), 3);
        let error = counter.sum() - counter.approximate();
        assert!(error.abs() <= 1, "one slot in use, batch 2: {error}");
    });
}

/// Two threads of one CPU, of which one moves.
#[test]
fn adds_of_one_cpu_lose_nothing() {
    both_modes(|| {
        let counter = counter();
        let other = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                counter.increment();
                set_current(CPU[1]);
                counter.add(-1);
            }
        });
        counter.increment();
        counter.add(5);
        other.join().unwrap();
        assert_eq!(counter.sum(), 6);
    });
}

/// The first adds of two threads take the words once.
#[test]
fn the_first_adds_race() {
    both_modes(|| {
        let counter = Arc::new(PerCpuCounter::with_batch(2));
        let other = thread::spawn({
            let counter = Arc::clone(&counter);
            move || counter.increment()
        });
        set_current(CPU[1]);
        counter.increment();
        assert!(counter.sum() <= 2);
        other.join().unwrap();
        assert_eq!(counter.sum(), 2);
    });
}

/// A thread without an rseq id beside one that has: the words belong to sections alone.
#[test]
fn a_thread_without_an_id_stays_off_the_words() {
    with_sections(true, || {
        let counter = counter();
        let foreign = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                take_id();
                counter.increment();
                counter.fold(CPU[0]);
            }
        });
        counter.increment();
        counter.increment();
        foreign.join().unwrap();
        assert_eq!(counter.sum(), 3);
    });
}

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("carry: add the drained word", "counter::adds_of_one_cpu_lose_nothing"),
    ("close: no section still adds", "counter::inv13_a_fold_loses_no_add"),
    ("reopen: the words are drained", "counter::inv13_a_fold_loses_no_add"),
    ("publish: the words are zero", "counter::the_first_adds_race"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] =
    &["reopen: the words are drained", "publish: the words are zero"];
