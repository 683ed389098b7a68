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
//! # Invariants
//!
//! 1. The sum of `remote` and of all words is, modulo 2^64, the sum of all adds that took effect.
//! 2. `base` is null, `NO_MEMORY`, or the result of `Words::into_raw`. Once it is not null it never
//!    changes.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;
use offlock_sync::AllocError;
use offlock_sync::atomic::{AtomicI64, AtomicPtr, AtomicU64, Ordering};
use offlock_sync::{const_fn, order};

use crate::cpu;
use crate::rseq;
use crate::words::Words;

/// The value of `base` if there was no memory for words, so that every add goes to `remote`. It is
/// an address in the first page, where no allocation lies.
const NO_MEMORY: usize = align_of::<AtomicU64>();

/// A sum that many threads add to without sharing a cache line.
///
/// An [`add`](Self::add) never fails, and none but the first waits: a few plain instructions with rseq sections,
/// and one `lock`-prefixed instruction on a cache line of this CPU without. [`sum`](Self::sum) visits
/// every CPU. It has 64 bits and wraps around, like `wrapping_add`.
///
/// The first add of a counter takes 8 bytes per CPU from a pool, which blocks shortly and may map
/// memory; [`reserve`](Self::reserve) does so beforehand. If memory is out, every add of this
/// counter goes to one shared word, which is correct but slow.
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
    /// The words (invariant 2).
    base: AtomicPtr<AtomicU64>,
    /// The adds of threads that must not change a word, and all adds if there are no words.
    remote: AtomicI64,
}

#[cfg(all(target_arch = "x86_64", not(offlock_model)))]
const _: () = assert!(size_of::<PerCpuCounter>() == 128);

impl PerCpuCounter {
    const_fn! {
        /// Creates a counter of 0.
        #[must_use]
        pub const fn new() -> Self {
            Self(CachePadded::new(Shared {
                base: AtomicPtr::new(ptr::null_mut()),
                remote: AtomicI64::new(0),
            }))
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
        let Some(words) = self.words() else { return self.first_add(delta) };
        // Without sections `add` refuses at once, which saves a test of `available`.
        if rseq::add(None, &words, delta as u64).is_err() {
            self.add_without_section(&words, delta);
        }
    }

    /// Returns the sum of all adds. Wait-free: one load per possible CPU.
    ///
    /// Each add that happened before the call counts once. An add at the same time may or may not
    /// count. So if no delta is negative, a later sum is not less than an earlier one of the same
    /// thread.
    #[must_use]
    pub fn sum(&self) -> i64 {
        let words = self.words();
        let near = words.iter().flat_map(|words| words.iter()).map(|word| {
            // Ordering: Relaxed; the adds that must count happened before the call.
            word.load(Ordering::Relaxed) as i64
        });
        // Ordering: Relaxed; the adds that must count happened before the call.
        near.fold(self.0.remote.load(Ordering::Relaxed), i64::wrapping_add)
    }

    /// Allocates the words now instead of at the first add.
    ///
    /// A global allocator, or a signal handler, may add to the counter once this has returned. An
    /// earlier add of theirs may wait for itself.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out. Every add then goes to one shared word.
    pub fn reserve(&self) -> Result<(), AllocError> {
        self.words_or_alloc().map(drop).ok_or_else(AllocError::new)
    }

    /// Returns the words, or `None` if they are not allocated.
    #[inline(always)]
    fn words(&self) -> Option<ManuallyDrop<Words>> {
        // Ordering: Acquire pairs with the Release in `words_or_alloc`; it carries the zeros.
        let base = self.0.base.load(Ordering::Acquire);
        if base.addr() <= NO_MEMORY {
            return None;
        }
        // SAFETY: the check above excludes null.
        let base = unsafe { NonNull::new_unchecked(base) };
        // SAFETY: by invariant 2 `base` came from `into_raw`; this `Words` is never dropped.
        Some(ManuallyDrop::new(unsafe { Words::from_raw(base) }))
    }

    /// Returns the words, allocated if necessary. Returns `None` for ever once memory was out.
    #[cold]
    fn words_or_alloc(&self) -> Option<ManuallyDrop<Words>> {
        let base = &self.0.base;
        // Ordering: Relaxed; a test for null, and `words` loads the pointer again.
        if base.load(Ordering::Relaxed).is_null() {
            // Decides whether there are sections and ids before there are words, so that no add has to.
            let _ = (rseq::available(), cpu::recent_cpu());
            let new = match Words::new() {
                Ok(words) => words.into_raw().as_ptr(),
                Err(_) => ptr::without_provenance_mut(NO_MEMORY),
            };
            let publish = order!(Release, "publish: the words are zero");
            // Ordering: Release on success pairs with the Acquire in `words`; it carries the zeros
            // of the words. Relaxed on failure: `words` loads it again.
            let set = base.compare_exchange(ptr::null_mut(), new, publish, Ordering::Relaxed);
            if let (true, Some(new)) = (set.is_err() && new.addr() > NO_MEMORY, NonNull::new(new)) {
                // SAFETY: `new` came from `into_raw` above and was not published.
                drop(unsafe { Words::from_raw(new) });
            }
        }
        self.words()
    }

    #[cold]
    #[inline(never)]
    fn first_add(&self, delta: i64) {
        match self.words_or_alloc() {
            Some(_) => self.add(delta),
            None => self.add_remote(delta),
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

impl Drop for PerCpuCounter {
    fn drop(&mut self) {
        if let Some(words) = self.words() {
            // `&mut self` excludes every operation, and this is the only drop of the words.
            drop(ManuallyDrop::into_inner(words));
        }
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
            for (word, value) in counter.words_or_alloc().unwrap().iter().zip(&words) {
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

    /// If memory for the words was out once, the remote word holds everything.
    #[test]
    fn without_words_every_add_goes_to_the_remote_word() {
        let counter = PerCpuCounter::new();
        counter.0.base.store(ptr::without_provenance_mut(NO_MEMORY), Ordering::Relaxed);
        assert_eq!(counter.reserve(), Err(AllocError::new()));
        counter.add(3);
        counter.increment();
        assert_eq!((counter.sum(), counter.0.remote.load(Ordering::Relaxed)), (4, 4));
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
