//! The contents of the words, with sections or without, as this process runs.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::possible_cpus;

const CPU0: CpuId = CpuId::new(0);

/// Sets the word of every CPU, as if that CPU had added the value.
fn preset(counter: &PerCpuCounter, values: impl Iterator<Item = i64>) {
    let words = counter.words_or_alloc().unwrap();
    for (word, value) in words.iter().zip(values) {
        assert!(value.abs() < counter.hot.batch);
        word.store(value as u64, Ordering::Relaxed);
    }
}

fn held(counter: &PerCpuCounter) -> Vec<i64> {
    let words = counter.words();
    words.iter().flat_map(|words| words.iter()).map(|w| w.load(Ordering::Relaxed) as i64).collect()
}

/// Generates small deltas, deltas around a batch, and deltas that wrap.
fn delta() -> impl Strategy<Value = i64> {
    prop_oneof![
        4 => -3_i64..=3,
        2 => -300_i64..=300,
        1 => any::<i64>(),
        1 => prop_oneof![Just(i64::MIN), Just(i64::MAX), Just(i64::from(u32::MAX)), Just(i64::MIN / 4)],
    ]
}

fn batch() -> impl Strategy<Value = u32> {
    prop_oneof![0_u32..5, Just(BATCH), Just(u32::MAX)]
}

proptest! {
    /// Adds to any words and any shared sum give the wrapped sum, and keep the words in range.
    #[test]
    fn inv03_the_sum_is_exact_from_any_start(
        batch in batch(),
        start in any::<i64>(),
        words in vec(any::<i64>(), possible_cpus()),
        deltas in vec(delta(), 0..60),
    ) {
        let counter = PerCpuCounter::with_batch(batch);
        let bound = i64::from(batch.max(1));
        let words: Vec<i64> = words.into_iter().map(|word| word % bound).collect();
        preset(&counter, words.iter().copied());
        counter.shared.store(start, Ordering::Relaxed);
        let mut model = words.iter().copied().fold(start, i64::wrapping_add);
        prop_assert_eq!(counter.sum(), model);
        for delta in deltas {
            counter.add(delta);
            model = model.wrapping_add(delta);
            prop_assert_eq!(counter.sum(), model);
            prop_assert!(held(&counter).iter().all(|word| word.abs() < bound), "{:?}", held(&counter));
        }
    }

    /// The error of the approximate value is the sum of the words: less than a batch for each slot.
    #[test]
    fn inv04_the_error_is_below_a_batch_for_each_slot(
        batch in batch(),
        words in vec(any::<i64>(), possible_cpus()),
        deltas in vec(delta(), 0..60),
    ) {
        let counter = PerCpuCounter::with_batch(batch);
        let bound = i64::from(batch.max(1));
        preset(&counter, words.into_iter().map(|word| word % bound));
        let limit = possible_cpus() as i64 * (bound - 1);
        for delta in deltas {
            let error = counter.sum().wrapping_sub(counter.approximate());
            prop_assert!((-limit..=limit).contains(&error), "{error} of {limit}");
            counter.add(delta);
        }
    }

    /// A fold changes no sum, whether the CPU is online, is offline or does not exist.
    #[test]
    fn inv06_folding_changes_no_sum(
        start in any::<i64>(),
        words in vec(-255_i64..=255, possible_cpus()),
        cpus in vec(0..possible_cpus() as u32 + 2, 0..6),
    ) {
        let counter = PerCpuCounter::new();
        preset(&counter, words.iter().copied());
        counter.shared.store(start, Ordering::Relaxed);
        let sum = counter.sum();
        let mut left = words;
        for cpu in cpus {
            let want = left.get_mut(cpu as usize).map_or(0, std::mem::take);
            prop_assert_eq!(counter.fold(CpuId::new(cpu)), want);
            prop_assert_eq!((counter.sum(), held(&counter)), (sum, left.clone()));
        }
    }
}

#[test]
fn inv06_folding_every_cpu_changes_no_sum() {
    let counter = PerCpuCounter::new();
    preset(&counter, std::iter::repeat(7));
    let sum = counter.sum();
    for cpu in (0..cpu::possible_cpus() as u32).map(CpuId::new) {
        assert_eq!((counter.fold(cpu), counter.sum()), (7, sum));
    }
    assert_eq!((counter.approximate(), counter.fold(CPU0)), (sum, 0));
    assert_eq!(counter.hot.gate.load(Ordering::Relaxed), 0, "open again");
}

/// While a fold keeps the gate closed, every add goes to the shared sum.
#[test]
fn inv13_no_word_takes_an_add_while_the_gate_is_closed() {
    if !section::available() {
        return; // no gate: a fold is an atomic swap
    }
    let counter = PerCpuCounter::new();
    preset(&counter, std::iter::repeat(5));
    let words = held(&counter);
    counter.close();
    counter.close();
    for delta in [1, -1, i64::MAX, i64::MIN] {
        let (sum, shared) = (counter.sum(), counter.approximate());
        counter.add(delta);
        assert_eq!(counter.sum(), sum.wrapping_add(delta));
        assert_eq!(counter.approximate(), shared.wrapping_add(delta));
        counter.reopen();
        counter.close();
    }
    assert_eq!(held(&counter), words);
    counter.reopen();
    counter.reopen();
    let shared = counter.approximate();
    counter.add(1);
    assert_eq!(counter.approximate(), shared, "a word takes adds again");
}

/// If memory for the words was out once, the shared sum holds everything.
#[test]
fn without_words_every_add_goes_to_the_shared_sum() {
    let counter = PerCpuCounter::new();
    counter.hot.base.store(ptr::without_provenance_mut(NO_MEMORY), Ordering::Relaxed);
    assert_eq!(counter.reserve(), Err(AllocError::new()));
    counter.add(3);
    counter.increment();
    assert_eq!(counter.fold(CPU0), 0);
    assert_eq!((counter.sum(), counter.approximate()), (4, 4));
}

#[test]
fn a_new_counter_starts_from_zeroed_words() {
    for _ in 0..100 {
        let counter = PerCpuCounter::default();
        counter.add(9);
        assert_eq!((counter.sum(), counter.batch()), (9, BATCH));
        assert!(format!("{counter:?}").starts_with("PerCpuCounter { approximate: "));
    }
}

/// Compile-time checks of auto traits.
#[expect(dead_code, reason = "compiling is the test")]
fn marker() {
    fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<PerCpuCounter>();
}
