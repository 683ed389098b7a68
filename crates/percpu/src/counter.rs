//! A counter in which every CPU adds to its own word.
//!
//! ```text
//!             add(delta)                                  approximate()
//!                 | near                                       |
//!                 v          batch reached: carry              v
//!  cpu 0: word  -100 ------------------------------>  shared: 51_200
//!  cpu 1: word  + 17                                       ^
//!  cpu 2: word     0 <- fold: carry -----------------------'       sum() = shared + all words
//! ```
//!
//! A word stays strictly between `-batch` and `batch`. An add that would leave that range carries
//! the word over to the shared sum, and a delta outside that range goes there at once.
//!
//! # Exclusion
//!
//! ```text
//!                    | sections in use                     | no sections
//!  add, add          | the section: same CPU only          | fetch_add on the word
//!  add, fold         | gate closed, heavy_rseq(), then the | a swap of the word with 0
//!                    | only the fold changes the words     |
//!  add without a CPU | shared sum only: never a word       | -
//! ```
//!
//! The design is that of the Linux kernel's `lib/percpu_counter.c`, which takes a spin lock where
//! this counter adds to the shared sum.
//!
//! # Invariants
//!
//! 1. The sum of `shared`, of all words and of the amounts that operations in flight carry is,
//!    modulo 2^64, the sum of all adds that took effect.
//! 2. A word is strictly between `-batch` and `batch`. Without sections, adds in flight may have
//!    taken it further, and each of them carries it over.
//! 3. `base` is null, `NO_MEMORY`, or the result of `Words::into_raw`. Once it is not null it never
//!    changes.
//! 4. With sections in use, sections change the words; a fold changes them only while the gate is
//!    not 0 and after a `heavy_rseq` that followed the closing. Without sections, atomics change
//!    the words.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicI64, AtomicPtr, AtomicU64, Ordering};
use offlock_sync::const_fn;
use offlock_sync::{order, step};

use crate::cpu::{self, CpuId};
use crate::error::AllocError;
use crate::fence;
use crate::rseq::section;
use crate::starting::is_starting;
use crate::words::Words;

/// The default batch: a CPU carries its word over before the word reaches it.
///
/// Measured by row P2 of `cargo bench --bench percpu`: two threads add 1.7 times as much as one
/// with a batch of 256, 1.90 times with 1,024 and 1.93 times with 2,048, because a carry moves a
/// cache line between CPUs.
const BATCH: u32 = 2_048;

/// The value of `base` if there was no memory for words, so that every add goes to the shared sum.
/// It is an address in the first page, where no allocation lies.
const NO_MEMORY: usize = align_of::<AtomicU64>();

/// A sum that many threads add to without sharing a cache line.
///
/// An [`add`](Self::add) never fails and never waits: a few plain instructions with rseq sections,
/// and one `lock`-prefixed instruction on a cache line of this CPU without. It is wait-free, except
/// for one add per batch, which is lock-free. [`approximate`](Self::approximate) is one load;
/// [`sum`](Self::sum) visits every CPU. The sum has 64 bits and wraps around, like `wrapping_add`.
///
/// The first add of a counter takes 8 bytes per CPU from a pool, which blocks shortly and may map
/// memory; [`reserve`](Self::reserve) does so beforehand. If memory is out, every add of this
/// counter goes to the shared sum, which is correct but slow.
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
/// assert_eq!(REQUESTS.sum(), 4_000); // exact: all adds happened before
/// let error = 4_000 - REQUESTS.approximate();
/// assert!(error <= 2_047 * offlock_percpu::topology().capacity() as i64);
/// ```
pub struct PerCpuCounter {
    hot: CachePadded<Hot>,
    /// The shared sum. Every carry writes it, so it is not on the cache line that every add reads.
    shared: CachePadded<AtomicI64>,
}

/// The cache line that every add reads. Only the first add and folds write it.
struct Hot {
    /// The number of folds that keep sections out. Sections commit only while it is 0.
    gate: AtomicU64,
    /// The words (invariant 3).
    base: AtomicPtr<AtomicU64>,
    /// At least 1.
    batch: i64,
}

#[cfg(all(target_arch = "x86_64", not(offlock_model)))]
const _: () = assert!(size_of::<PerCpuCounter>() == 256);

impl PerCpuCounter {
    const_fn! {
        /// Creates a counter of 0 with a batch of 2,048.
        #[must_use]
        pub const fn new() -> Self {
            Self::with_batch(BATCH)
        }
    }

    const_fn! {
        /// Creates a counter of 0. A CPU carries its word over before the word reaches `batch`.
        ///
        /// A larger batch means fewer writes to the shared sum and a larger error of
        /// [`approximate`](Self::approximate). With a batch of 1 every add goes to the shared sum,
        /// and `approximate` is exact. 0 means 1.
        #[must_use]
        pub const fn with_batch(batch: u32) -> Self {
            let batch = if batch == 0 { 1 } else { batch as i64 };
            Self {
                hot: CachePadded::new(Hot {
                    gate: AtomicU64::new(0),
                    base: AtomicPtr::new(ptr::null_mut()),
                    batch,
                }),
                shared: CachePadded::new(AtomicI64::new(0)),
            }
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
        // Without sections `add_within` refuses at once, which saves a test of `available`.
        if section::add_within(&self.hot.gate, &words, delta, self.hot.batch).is_err() {
            self.add_slow(&words, delta);
        }
    }

    /// Returns the sum of all adds. Wait-free: one load per possible CPU.
    ///
    /// The sum is exact if every operation happened before the call, as after a join. Otherwise a
    /// concurrent add may or may not count, and an amount that it carries over just now (less than
    /// the batch) may count twice or not at all. So sums beside adds are not monotone: the second of two
    /// may be less than the first, which a consumer of a monotone counter takes for a reset.
    #[must_use]
    pub fn sum(&self) -> i64 {
        let words = self.words();
        let near = words.iter().flat_map(|words| words.iter()).map(|word| {
            // Ordering: Relaxed; the adds that must count happened before the call.
            word.load(Ordering::Relaxed) as i64
        });
        // Ordering: Relaxed; the carries that must count happened before the call.
        near.fold(self.shared.load(Ordering::Relaxed), i64::wrapping_add)
    }

    /// Returns the shared sum alone. Wait-free: one load.
    ///
    /// The error is at most `capacity x (batch - 1)`, with [the capacity of the
    /// topology](crate::Topology::capacity), plus, for each add in flight, its delta and the amount
    /// that it carries, which is less than the batch.
    #[inline]
    #[must_use]
    pub fn approximate(&self) -> i64 {
        // Ordering: Relaxed; the value publishes no other memory.
        self.shared.load(Ordering::Relaxed)
    }

    /// Returns the batch: a CPU carries its word over before the word reaches it.
    #[must_use]
    pub fn batch(&self) -> u32 {
        self.hot.batch as u32 // the constructor made it from a u32
    }

    /// Allocates the words now instead of at the first add.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out. Every add then goes to the shared sum.
    pub fn reserve(&self) -> Result<(), AllocError> {
        self.words_or_alloc().map(drop).ok_or_else(AllocError::new)
    }

    /// Carries the word of `cpu` over to the shared sum and returns its value. Returns 0 for a CPU
    /// that does not exist. The sum stays the same.
    ///
    /// Lock-free. With sections in use it costs a [`fence::heavy`], and concurrent adds on every
    /// CPU go to the shared sum.
    pub fn fold(&self, cpu: CpuId) -> i64 {
        let Some(words) = self.words().filter(|_| cpu.index() < cpu::possible()) else { return 0 };
        let close = section::available();
        if close {
            self.close();
        }
        let held = drain(words.slot(cpu));
        self.carry(held, 0);
        if close {
            self.reopen();
        }
        held
    }

    /// Returns the words, or `None` if they are not allocated.
    #[inline(always)]
    fn words(&self) -> Option<ManuallyDrop<Words>> {
        // Ordering: Acquire pairs with the Release in `words_or_alloc`; it carries the zeros.
        let base = self.hot.base.load(Ordering::Acquire);
        if base.addr() <= NO_MEMORY {
            return None;
        }
        // SAFETY: the check above excludes null.
        let base = unsafe { NonNull::new_unchecked(base) };
        // SAFETY: by invariant 3 `base` came from `into_raw`; this `Words` is never dropped.
        Some(ManuallyDrop::new(unsafe { Words::from_raw(base) }))
    }

    /// Returns the words, allocated if necessary. Returns `None` for ever once memory was out.
    #[cold]
    fn words_or_alloc(&self) -> Option<ManuallyDrop<Words>> {
        // Ordering: Relaxed; a test for null, and `words` loads the pointer again.
        if self.hot.base.load(Ordering::Relaxed).is_null() {
            // Decides whether there are sections before there are words, so that no add has to.
            let _ = section::available();
            let new = match Words::new() {
                Ok(words) => words.into_raw().as_ptr(),
                Err(_) => ptr::without_provenance_mut(NO_MEMORY),
            };
            let publish = order!(Release, "publish: the words are zero");
            let base = &self.hot.base;
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
        // An allocator that counts may get here inside the start-up that `words_or_alloc` waits for.
        let words = if is_starting() { None } else { self.words_or_alloc() };
        match words {
            Some(_) => self.add(delta),
            None => self.carry(0, delta),
        }
    }

    /// Adds after `add_within` refused: there are no sections, the thread has no CPU id, the gate
    /// is closed, or the word would leave its range.
    #[inline(never)]
    fn add_slow(&self, words: &Words, delta: i64) {
        let batch = self.hot.batch;
        if section::available() {
            // The thread may be on another CPU by now; any word may be carried over. A refused swap
            // changes no word.
            let swapped = section::swap(&self.hot.gate, words, 0);
            self.carry(swapped.map_or(0, |(_, held)| held as i64), delta);
        } else if -batch < delta && delta < batch {
            let word = words.slot(cpu::recent_cpu());
            // Ordering: Relaxed; the word publishes no other memory.
            let before = word.fetch_add(delta as u64, Ordering::Relaxed) as i64;
            let after = before.wrapping_add(delta);
            if after <= -batch || batch <= after {
                // The word may be back in range, if another thread carried or folded it since.
                self.carry(drain(word), 0);
            }
        } else {
            self.carry(0, delta);
        }
    }

    /// Adds `held`, the value of a drained word, and `delta` to the shared sum.
    #[cold]
    #[inline(never)]
    fn carry(&self, held: i64, delta: i64) {
        let mut sum = delta;
        step!("carry: add the drained word", sum = sum.wrapping_add(held));
        // Ordering: Relaxed; it publishes no other memory, and a later load by this thread cannot
        // return an older sum.
        self.shared.fetch_add(sum, Ordering::Relaxed);
    }

    /// Closes the gate. When it returns, no section that began earlier can still commit.
    fn close(&self) {
        // Ordering: Relaxed; every section that commits after `heavy_rseq` sees the closed gate.
        self.hot.gate.fetch_add(1, Ordering::Relaxed);
        step!("close: no section still adds", fence::heavy_rseq());
    }

    fn reopen(&self) {
        // Ordering: Release pairs with the load of the gate at the start of a section; it carries
        // the drained words.
        self.hot.gate.fetch_sub(1, order!(Release, "reopen: the words are drained"));
    }
}

/// Sets a word to 0 and returns its value.
fn drain(word: &AtomicU64) -> i64 {
    // Ordering: Relaxed. With sections in use the gate orders it; without, it publishes nothing.
    word.swap(0, Ordering::Relaxed) as i64
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
        f.debug_struct("PerCpuCounter")
            .field("approximate", &self.approximate())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests;
