//! A counter to which every CPU adds in a word of its own.
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
//! A word stays strictly between `-batch` and `batch`: an add that leaves that range carries the
//! word over to the shared sum, and a delta that alone is larger goes there at once. What excludes
//! what:
//!
//! ```text
//!                    | sections in use                     | no sections
//!  add, add          | the section: same CPU only          | fetch_add on the word
//!  add, fold         | gate closed, heavy_rseq(), then the | a swap of the word with 0
//!                    | words are the folder's alone        |
//!  add without a CPU | shared sum only: never a word       | -
//! ```
//!
//! Source: the kernel's `percpu_counter` (`lib/percpu_counter.c`), which takes a spin lock where
//! this counter adds to the shared sum.
//!
//! # Invariants
//!
//! 1. The sum of `shared`, all words and what operations in flight carry is, modulo 2^64, the sum of
//!    all adds that took effect.
//! 2. A word is strictly between `-batch` and `batch`; without sections, adds in flight may have
//!    taken it further, and each of them carries it over.
//! 3. `base` is null, `NO_MEMORY`, or what `Words::into_raw` gave; once not null it stays.
//! 4. With sections in use, words are changed by sections, or while the gate is not 0 and after a
//!    `heavy_rseq` that followed its closing. Without, by atomics.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;

use crate::cpu::CpuId;
use crate::error::AllocError;
use crate::fence;
use crate::rseq::section;
use crate::starting::is_starting;
use crate::sync::atomic::{AtomicI64, AtomicPtr, AtomicU64, Ordering};
use crate::sync::{cpu, mutant};
use crate::topology::online;
use crate::words::Words;

/// How far a CPU's word goes before it is carried over, unless the caller says.
///
/// Measured, by row P2 of `cargo bench --bench percpu`: two threads add 1.7 times as much as one
/// with 256, 1.90 with 1,024 and 1.93 with this, since a carry moves a line between CPUs.
const BATCH: u32 = 2_048;

/// `base` when there was no memory for words: every add goes to the shared sum. An address in the
/// first page, which no allocation has.
const NO_MEMORY: usize = align_of::<AtomicU64>();

/// A sum that many threads add to without sharing a cache line.
///
/// [`add`](Self::add) and [`increment`](Self::increment) never fail, and do not wait: a few plain
/// instructions with rseq sections (`cargo bench --bench percpu`, rows P2), one `lock`-prefixed
/// instruction on a line of this CPU without; wait-free, but for one add in a batch, which is
/// lock-free.
///
/// The first add of a counter takes 8 bytes per CPU from a pool, which blocks shortly
/// and may map memory (a page per CPU for every 512 counters; see the [crate's page](crate));
/// [`reserve`](Self::reserve) does so beforehand. Where there is none, every add of this counter
/// goes to the shared sum, which is right and slow. Nothing else allocates, but
/// [`fold_offline`](Self::fold_offline).
///
/// The sum is of 64 bits and wraps around, as `wrapping_add` does.
///
/// [`approximate`](Self::approximate) is one load; [`sum`](Self::sum) visits every CPU.
///
/// ```
/// use percpu::PerCpuCounter;
///
/// static REQUESTS: PerCpuCounter = PerCpuCounter::new();
///
/// std::thread::scope(|s| {
///     for _ in 0..4 {
///         s.spawn(|| (0..1_000).for_each(|_| REQUESTS.increment()));
///     }
/// });
/// assert_eq!(REQUESTS.sum(), 4_000); // exact, as nobody is adding any more
/// let error = 4_000 - REQUESTS.approximate();
/// assert!(error <= 2_047 * percpu::topology().capacity() as i64);
/// ```
pub struct PerCpuCounter {
    hot: CachePadded<Hot>,
    /// What every carry writes, off the line that every add reads.
    shared: CachePadded<AtomicI64>,
}

/// What every add reads. The first add and each fold write it.
struct Hot {
    /// How many folds keep sections out; 0 is open.
    gate: AtomicU64,
    base: AtomicPtr<AtomicU64>,
    /// At least 1.
    batch: i64,
}

#[cfg(all(target_arch = "x86_64", not(any(offlock_loom, offlock_shuttle))))]
const _: () = assert!(size_of::<PerCpuCounter>() == 256);

/// The constructors: `const` where atomics have such.
macro_rules! constructors {
    ($($const:tt)?) => {
        impl PerCpuCounter {
            /// Makes a counter of 0 that carries over every 2,048.
            #[must_use]
            pub $($const)? fn new() -> Self {
                Self::with_batch(BATCH)
            }

            /// Makes a counter of 0 whose CPUs carry over before they hold `batch`.
            ///
            /// A larger batch makes for fewer writes to the shared sum, and a larger error of
            /// [`approximate`](Self::approximate). With 1, or 0 which means the same, no CPU
            /// keeps anything, and `approximate` is exact.
            #[must_use]
            pub $($const)? fn with_batch(batch: u32) -> Self {
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
    };
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
constructors!(const);
#[cfg(any(offlock_loom, offlock_shuttle))]
constructors!();

impl PerCpuCounter {
    /// Adds 1. See [`add`](Self::add).
    #[inline]
    pub fn increment(&self) {
        self.add(1);
    }

    /// Adds `delta`, which may be negative.
    ///
    /// It publishes nothing: who reads the sum and then other memory needs an ordering of its own.
    #[inline]
    pub fn add(&self, delta: i64) {
        let Some(words) = self.words() else { return self.first_add(delta) };
        // Refused at once where there are no sections: one test less than asking first.
        if section::add_within(&self.hot.gate, &words, delta, self.hot.batch).is_err() {
            self.add_slow(&words, delta);
        }
    }

    /// The shared sum and that of every CPU. Wait-free: a load for each possible CPU.
    ///
    /// Exact if no operation runs at the same time and all that ran happened before, as after a
    /// join. Else adds of the same moment may count or not, and what one of them is just carrying
    /// over (less than the batch) may be counted twice or not at all.
    #[must_use]
    pub fn sum(&self) -> i64 {
        let words = self.words();
        let near = words.iter().flat_map(|words| words.iter()).map(|word| {
            // Ordering: Relaxed; what must be seen happened before by the caller's doing.
            word.load(Ordering::Relaxed) as i64
        });
        // Ordering: Relaxed; as above.
        near.fold(self.shared.load(Ordering::Relaxed), i64::wrapping_add)
    }

    /// The shared sum alone. Wait-free: one load.
    ///
    /// It is off by at most `capacity x (batch - 1)`, with [the capacity of the
    /// topology](crate::Topology::capacity), and by the adds in flight, each of which counts with
    /// its delta and with what it carries, less than the batch.
    #[inline]
    #[must_use]
    pub fn approximate(&self) -> i64 {
        // Ordering: Relaxed; a value on its own.
        self.shared.load(Ordering::Relaxed)
    }

    /// How far a CPU's word goes before it is carried over.
    #[must_use]
    pub fn batch(&self) -> u32 {
        self.hot.batch as u32 // from a u32 by the constructor
    }

    /// Takes the words now rather than at the first add.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for them. Adds go to the shared sum from then on.
    pub fn reserve(&self) -> Result<(), AllocError> {
        self.words_or_alloc().map(drop).ok_or_else(AllocError::new)
    }

    /// Carries what `cpu` holds over to the shared sum and returns it; nothing for a CPU that does
    /// not exist. The sum stays the same.
    ///
    /// Lock-free. With sections in use it costs a [`fence::heavy`], and adds of the same moment,
    /// on every CPU, go to the shared sum.
    pub fn fold(&self, cpu: CpuId) -> i64 {
        self.fold_each(|| (cpu.index() < cpu::possible()).then_some(cpu).into_iter())
    }

    /// Carries what CPUs hold that are not online now over to the shared sum, and returns it.
    ///
    /// Like [`fold`](Self::fold), at the price of one. Also reads `/sys`, so it allocates and may
    /// block.
    ///
    /// # Errors
    ///
    /// If `/sys/devices/system/cpu/online` cannot be read; nothing was carried.
    pub fn fold_offline(&self) -> io::Result<i64> {
        let online = online()?;
        Ok(self.fold_each(|| {
            let all = (0..cpu::possible() as u32).map(CpuId::new);
            all.filter(|&cpu| !online.contains(cpu))
        }))
    }

    /// The words, if they were taken.
    #[inline(always)]
    fn words(&self) -> Option<ManuallyDrop<Words>> {
        // Ordering: Acquire pairs with the Release in `words_or_alloc`; it carries the words' zeros.
        let base = self.hot.base.load(Ordering::Acquire);
        if base.addr() <= NO_MEMORY {
            return None;
        }
        // SAFETY: not null, as just checked.
        let base = unsafe { NonNull::new_unchecked(base) };
        // SAFETY: invariant 3, it is from `into_raw`; this one is never dropped.
        Some(ManuallyDrop::new(unsafe { Words::from_raw(base) }))
    }

    /// The words, taken now if they were not; `None` if there is no memory, now and for ever.
    #[cold]
    fn words_or_alloc(&self) -> Option<ManuallyDrop<Words>> {
        // Ordering: Acquire as in `words`.
        if self.hot.base.load(Ordering::Acquire).is_null() {
            // Decided before there are words, so that no add has to.
            let _ = section::available();
            let new = match Words::new() {
                Ok(words) => words.into_raw().as_ptr(),
                Err(_) => ptr::without_provenance_mut(NO_MEMORY),
            };
            let publish = if mutant("counter-words-published-relaxed") {
                Ordering::Relaxed
            } else {
                Ordering::Release
            };
            // Ordering: Release on success pairs with the Acquire in `words`; it carries the zeros
            // of the words. Relaxed on failure: `words` loads it again.
            let lost = self
                .hot
                .base
                .compare_exchange(ptr::null_mut(), new, publish, Ordering::Relaxed)
                .is_err();
            if let (true, Some(new)) = (lost && new.addr() > NO_MEMORY, NonNull::new(new)) {
                // SAFETY: from `into_raw` above, and nobody else has seen it.
                drop(unsafe { Words::from_raw(new) });
            }
        }
        self.words()
    }

    #[cold]
    #[inline(never)]
    fn first_add(&self, delta: i64) {
        // An allocator that counts comes here from inside of what it would wait for.
        let words = if is_starting() { None } else { self.words_or_alloc() };
        match words {
            Some(_) => self.add(delta),
            None => self.carry(0, delta),
        }
    }

    /// An add whose section was refused: there are none, or no CPU id, the gate is closed, or the
    /// word is full.
    #[inline(never)]
    fn add_slow(&self, words: &Words, delta: i64) {
        let batch = self.hot.batch;
        if section::available() {
            // Whichever CPU that is by now: any word may be carried over. A refusal leaves all alone.
            let swapped = section::swap(&self.hot.gate, words, 0);
            self.carry(swapped.map_or(0, |(_, held)| held as i64), delta);
        } else if -batch < delta && delta < batch {
            let word = words.slot(cpu::recent());
            // Ordering: Relaxed; the word is the whole message.
            let before = word.fetch_add(delta as u64, Ordering::Relaxed) as i64;
            let after = before.wrapping_add(delta);
            if after <= -batch || batch <= after {
                self.carry_atomic(word);
            }
        } else {
            self.carry(0, delta);
        }
    }

    /// Carries a word over that an add made full. It holds less, or nothing, if another thread
    /// carried or folded it since.
    #[cold]
    #[inline(never)]
    fn carry_atomic(&self, word: &AtomicU64) {
        self.carry(drain(word), 0);
    }

    fn carry(&self, held: i64, delta: i64) {
        let sum =
            if mutant("counter-carry-forgets-the-word") { delta } else { held.wrapping_add(delta) };
        // Ordering: Relaxed; it publishes nothing, and no sum that could be smaller than this
        // read-modify-write is read from it later.
        self.shared.fetch_add(sum, Ordering::Relaxed);
    }

    /// Keeps sections out; when it returns, none begun before can commit any more.
    fn close(&self) {
        // Ordering: Relaxed; `heavy_rseq` makes every section that commits later see it.
        self.hot.gate.fetch_add(1, Ordering::Relaxed);
        if !mutant("counter-closes-without-the-fence") {
            fence::heavy_rseq();
        }
    }

    fn reopen(&self) {
        let order =
            if mutant("counter-reopens-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release pairs with the load of the gate that starts a section; it carries the
        // words as they were left.
        self.hot.gate.fetch_sub(1, order);
    }

    fn fold_each<I: Iterator<Item = CpuId>>(&self, cpus: impl FnOnce() -> I) -> i64 {
        let Some(words) = self.words() else { return 0 };
        let close = section::available() && !mutant("counter-folds-with-the-gate-open");
        if close {
            self.close();
        }
        let held = cpus().map(|cpu| drain(words.slot(cpu))).fold(0, i64::wrapping_add);
        // Ordering: Relaxed; as in `carry`.
        self.shared.fetch_add(held, Ordering::Relaxed);
        if close {
            self.reopen();
        }
        held
    }
}

/// Empties a word and returns what it held.
fn drain(word: &AtomicU64) -> i64 {
    // Ordering: Relaxed, all; with sections in use the gate orders them, and else the word is the
    // whole message.
    if mutant("counter-takes-in-two-steps") {
        let held = word.load(Ordering::Relaxed);
        word.store(0, Ordering::Relaxed);
        return held as i64;
    }
    word.swap(0, Ordering::Relaxed) as i64
}

impl Drop for PerCpuCounter {
    fn drop(&mut self) {
        if let Some(words) = self.words() {
            // The only owner: nobody is inside an operation, and this is the only drop of them.
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

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
