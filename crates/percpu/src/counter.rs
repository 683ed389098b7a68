//! A counter in which every CPU adds to its own word.
//!
//! ```text
//!  cpu 0: word  51_300   <- add, by a thread on CPU 0
//!  cpu 1: word     -17   <- add, by a thread on CPU 1
//!  remote:           3   <- add, by a thread without a CPU id        sum() = remote + all words
//! ```
//!
//! Where sections run, only sections change the words, so two adds of one CPU exclude each other.
//! Elsewhere an add is a `fetch_add` on the word. No code takes a value out of a word before the
//! counter is dropped.
//!
//! # Invariant
//!
//! The sum of `remote` and of all words is, modulo 2^64, the sum of all adds that took effect.

use std::fmt;

use crossbeam_utils::CachePadded;
use offlock_sync::AllocError;
use offlock_sync::atomic::{AtomicI64, Ordering};
use offlock_sync::const_fn;
use offlock_sync::native::OnceLock;

use crate::cpu;
use crate::rseq;
use crate::words::Words;

/// A sum that many threads add to without sharing a cache line.
///
/// An [`add`](Self::add) never fails, and none but the first waits: a few plain instructions with rseq sections,
/// and one `lock`-prefixed instruction on a cache line of this CPU without. [`sum`](Self::sum) visits
/// every CPU. It has 64 bits and wraps around, like `wrapping_add`.
///
/// The first add of a counter takes 8 bytes per CPU from a pool, which blocks shortly and may map
/// memory; [`reserve`](Self::reserve) does so beforehand. While memory is out, every add of this
/// counter tries that, and goes to one shared word: correct but slow.
///
/// ```
/// use offlock_percpu::PerCpuCounter;
///
/// static REQUESTS: PerCpuCounter = PerCpuCounter::new();
///
/// std::thread::scope(|s| {
///     for _ in 0..4 {
///         s.spawn(|| (0..1_000).for_each(|_| REQUESTS.increment()));
///     }
/// });
/// assert_eq!(REQUESTS.sum(), 4_000); // all adds happened before
/// ```
pub struct PerCpuCounter(CachePadded<Shared>);

/// The cache line that every add reads. Only the first add writes it, and threads without a CPU id.
struct Shared {
    /// Taken by the first add that finds memory.
    words: OnceLock<Words>,
    /// The adds of threads that must not change a word, and all adds while there are no words.
    remote: AtomicI64,
}

#[cfg(all(target_arch = "x86_64", not(offlock_model)))]
const _: () = assert!(size_of::<PerCpuCounter>() == 128);

impl PerCpuCounter {
    const_fn! {
        /// Creates a counter of 0.
        #[must_use]
        pub const fn new() -> Self {
            #[cfg(not(offlock_model))]
            let words = OnceLock::new();
            // A checker does not see that a `OnceLock` orders its value.
            #[cfg(offlock_model)]
            let words = OnceLock::from(Words::new().expect("a model has memory"));
            Self(CachePadded::new(Shared { words, remote: AtomicI64::new(0) }))
        }
    }

    /// Adds 1. See [`add`](Self::add).
    #[inline]
    pub fn increment(&self) {
        self.add(1);
    }

    /// Adds `delta`, which may be negative. An add publishes no other memory.
    #[inline]
    pub fn add(&self, delta: i64) {
        let Some(words) = self.0.words.get() else { return self.first_add(delta) };
        // Without sections `add` refuses at once, which saves a test of `available`.
        if rseq::add(None, words, delta as u64).is_err() {
            self.add_without_section(words, delta);
        }
    }

    /// Returns the sum of all adds. Wait-free: one load per possible CPU.
    ///
    /// Each add that happened before the call counts once. An add at the same time may or may not
    /// count. So if no delta is negative, a later sum is not less than an earlier one of the same
    /// thread.
    #[must_use]
    pub fn sum(&self) -> i64 {
        let near = self.0.words.get().into_iter().flat_map(Words::iter).map(|word| {
            // Ordering: Relaxed; the adds that must count happened before the call.
            word.load(Ordering::Relaxed) as i64
        });
        // Ordering: Relaxed; the adds that must count happened before the call.
        near.fold(self.0.remote.load(Ordering::Relaxed), i64::wrapping_add)
    }

    /// Allocates the words now instead of at the first add.
    ///
    /// A global allocator, or a signal handler, may add to the counter once this has returned `Ok`. Any
    /// other add of theirs may wait for itself.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    #[cold]
    pub fn reserve(&self) -> Result<(), AllocError> {
        if self.0.words.get().is_none() {
            // Decides whether there are sections and ids before there are words, so that no add has to.
            let _ = (rseq::available(), cpu::recent_cpu());
            let _ = self.0.words.set(Words::new()?); // another thread may have been first
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn first_add(&self, delta: i64) {
        match self.reserve() {
            Ok(()) => self.add(delta),
            Err(_) => self.add_remote(delta),
        }
    }

    /// Adds after the section refused: there are no sections, or the thread has no CPU id.
    #[inline(never)]
    fn add_without_section(&self, words: &Words, delta: i64) {
        if rseq::available() {
            return self.add_remote(delta);
        }
        // Ordering: Relaxed; the word publishes no other memory.
        words.slot(cpu::recent_cpu()).fetch_add(delta as u64, Ordering::Relaxed);
    }

    #[cold]
    fn add_remote(&self, delta: i64) {
        // Ordering: Relaxed; it publishes no other memory.
        self.0.remote.fetch_add(delta, Ordering::Relaxed);
    }
}

impl Default for PerCpuCounter {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for PerCpuCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PerCpuCounter").field(&self.sum()).finish()
    }
}

/// The contents of the words, with sections or without, as this process runs.
#[cfg(all(test, not(offlock_model)))]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::possible_cpus;

    /// Generates small deltas, and deltas that wrap.
    fn delta() -> impl Strategy<Value = i64> {
        prop_oneof![
            4 => -3_i64..=3,
            1 => any::<i64>(),
            1 => prop_oneof![Just(i64::MIN), Just(i64::MAX), Just(i64::from(u32::MAX))],
        ]
    }

    proptest! {
        /// Adds to any words and any remote word give the wrapped sum.
        #[test]
        fn inv03_the_sum_is_exact_from_any_start(
            remote in any::<i64>(),
            words in vec(any::<i64>(), possible_cpus()),
            deltas in vec(delta(), 0..60),
        ) {
            let counter = PerCpuCounter::new();
            counter.reserve().unwrap();
            for (word, value) in counter.0.words.get().unwrap().iter().zip(&words) {
                word.store(*value as u64, Ordering::Relaxed);
            }
            counter.0.remote.store(remote, Ordering::Relaxed);
            let mut model = words.iter().copied().fold(remote, i64::wrapping_add);
            prop_assert_eq!(counter.sum(), model);
            for delta in deltas {
                counter.add(delta);
                model = model.wrapping_add(delta);
                prop_assert_eq!(counter.sum(), model);
            }
            prop_assert_eq!(counter.0.remote.load(Ordering::Relaxed), remote, "this thread has an id");
        }
    }

    #[test]
    fn a_new_counter_starts_from_zeroed_words() {
        for _ in 0..100 {
            let counter = PerCpuCounter::default();
            counter.add(9);
            assert_eq!(format!("{counter:?}"), "PerCpuCounter(9)");
        }
    }
}
