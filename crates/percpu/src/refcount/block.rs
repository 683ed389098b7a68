//! Reference counts for an owner with many objects, each of which has a state word.
//!
//! A [`PercpuRef`](super::PercpuRef) has a gate, a closure and a mutex of its own. The owner of a
//! table has a state word per slot that says which object is in the slot, and does the kills
//! itself. So here the state word is the gate: sections count while it has the value that the owner
//! calls `open`. A count then takes only 8 bytes per CPU and 24 bytes more.
//!
//! ```text
//!  gate == open                                       gate != open, after the fold
//!  words:  | cpu 0: +3 | cpu 1: -1 | ...   -- fold --> words: closed, or behind the gate
//!  remote: 0   (threads without a CPU id)             remote: CLOSED
//!  atomic: BIAS                                       atomic: the count
//! ```
//!
//! # The life of a count
//!
//! | step | thread | operation |
//! |---|---|---|
//! | 1 | the owner, with exclusive access | calls [`open`](RefBlock::open), then stores `open` in the gate (Release) |
//! | 2 | any thread with a guard of the owner | calls [`try_get`](RefBlock::try_get) |
//! | | a holder of a reference | calls [`get_more`](RefBlock::get_more) and [`put`](RefBlock::put) |
//! | 3 | the owner | stores another value in the gate, calls [`heavy_rseq`](crate::fence::heavy_rseq) |
//! | 4 | the owner, once | calls [`fold`](RefBlock::fold), which returns true if no reference is left |
//! | | a holder of a reference | if `fold` returned false, the last `put` returns true, or a `put_if_last` does |
//! | 5 | the owner | waits until every guard of step 2 is gone; then repeats step 1, or drops the block |
//!
//! # Invariants
//!
//! The number of references is the sum of `words` and `remote` since the last fold, plus `atomic`,
//! less `BIAS` from `open` to the fold.
//!
//! 1. A change of a word or of `remote` counts only while that word is open, and in exactly one
//!    fold. A section commits only while the gate reads `open`, so no section commits after step 3.
//!    A fetch-and-add counts only if the value that it returns is open, and the fold closes by a
//!    swap.
//! 2. Between `open` and the fold `atomic` includes the bias, so no put takes it to 0. After the
//!    fold it is the number of references, and only the holder of a reference adds to it. So it
//!    reaches 0 once, by the fold or by one put, and stays 0.
//! 3. A void add (to a closed word) is never undone. A void add of a `try_get` is over before step
//!    5, and one of a holder before that holder's put. So each comes before the next `open`, which
//!    overwrites it.
//! 4. A put that is not the last accesses nothing after the instruction that counts it.

use std::array;
use std::fmt;

use crossbeam_utils::CachePadded;
use offlock_sync::atomic::{AtomicI64, AtomicU64, Ordering};
use offlock_sync::{check, order, step};

use super::words::{self, BIAS, CLOSED, try_add, try_add_without_section};
use crate::error::AllocError;
use crate::rseq::section::{self, Refused};
use crate::words::{BLOCK, WordBlock};

/// [`RefBlock::COUNTS`] reference counts, each gated by a word of its owner.
///
/// A get and a put cost the same as those of a [`PercpuRef`](super::PercpuRef). Every operation
/// except [`try_new`](Self::try_new) and the drop is wait-free and does not allocate. Memory: 1,664
/// bytes, and 512 bytes for every CPU, from a pool. Semantic versioning does not cover it.
///
/// # Panics
///
/// Each method that takes the index of a count panics if it is not below [`COUNTS`](Self::COUNTS).
#[repr(C)]
pub struct RefBlock {
    // The line that every get and put reads; no operation writes it.
    words: WordBlock,
    cold: CachePadded<Cold>,
}

/// The fields that threads without a CPU id write, and all threads after a kill.
struct Cold {
    counts: [Count; BLOCK],
}

/// The part of a count outside the words.
struct Count {
    atomic: AtomicI64,
    remote: AtomicU64,
    /// The sum of the words at the last fold, where sections run. Only the owner uses it.
    folded: AtomicU64,
}

#[cfg(all(target_arch = "x86_64", not(offlock_model)))]
const _: () = assert!(size_of::<RefBlock>() == 128 + BLOCK * 24);

impl RefBlock {
    /// The number of counts in a block: 64, and 2 in a model.
    pub const COUNTS: usize = BLOCK;

    /// Creates a block of closed counts.
    ///
    /// Blocks shortly while another thread takes memory from the pool, and may map memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new() -> Result<Self, AllocError> {
        let block = Self {
            words: WordBlock::new()?,
            cold: CachePadded::new(Cold {
                counts: array::from_fn(|_| Count {
                    atomic: AtomicI64::new(0),
                    remote: AtomicU64::new(CLOSED),
                    folded: AtomicU64::new(0),
                }),
            }),
        };
        if !section::available() {
            for i in 0..BLOCK {
                for word in block.words.words(i).iter() {
                    // Ordering: Relaxed; no other thread has the block yet.
                    word.store(CLOSED, Ordering::Relaxed);
                }
            }
        }
        Ok(block)
    }

    /// Prepares count `i` for a new life, which begins with no reference when the owner stores
    /// `open` in the gate, by a Release store.
    ///
    /// No other thread may use the count during the call. The owner may call this again before the
    /// first reference.
    #[inline]
    pub fn open(&self, i: usize) {
        let Count { atomic, remote, .. } = &self.cold.counts[i];
        // Ordering: Relaxed, all; the owner's Release store in the gate carries them to the Acquire
        // in `try_get`.
        let open = |word: &AtomicU64| {
            step!("open a count: from zero", word.store(0, Ordering::Relaxed));
        };
        if !section::available() {
            self.words.words(i).iter().for_each(open);
        }
        open(remote);
        atomic.store(BIAS, Ordering::Relaxed);
    }

    /// Takes a reference to count `i`, if `gate` reads `open` at the moment of counting.
    ///
    /// The calling thread then sees what the owner did before it stored `open` in the gate. The
    /// calling thread must hold a guard that keeps the owner from opening the count again, and from
    /// dropping the block, during the call.
    #[inline]
    #[must_use = "a reference that was taken must be put"]
    pub fn try_get(&self, i: usize, gate: &AtomicU64, open: u64) -> bool {
        match section::add(gate, open, &self.words.words(i), 1) {
            Ok(_) => true,
            Err(Refused::Closed | Refused::OutOfRange) => false,
            Err(Refused::NoCpu) => self.try_get_without_section(i, gate, open),
        }
    }

    /// Takes a reference without a section.
    fn try_get_without_section(&self, i: usize, gate: &AtomicU64, open: u64) -> bool {
        // If the gate closes between this load and the count, the reference counts as taken at this
        // load, before the gate closed.
        // Ordering: Acquire pairs with the owner's Release store of `open`; it carries what the
        // method `open` stored, and what the owner did to the object.
        if !check!("get a count: its gate is open", gate.load(Ordering::Acquire) == open) {
            return false;
        }
        try_add_without_section(&self.words.words(i), &self.cold.counts[i].remote, 1)
    }

    /// Takes one more reference, for a thread that already has one. Succeeds also after the gate
    /// was closed.
    #[inline]
    pub fn get_more(&self, i: usize, gate: &AtomicU64, open: u64) {
        if !self.try_add(i, gate, open, 1) {
            // Ordering: Relaxed, as in `Arc`: the existing reference keeps the count above zero,
            // and passing the new reference to another thread orders that thread after this.
            self.cold.counts[i].atomic.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Puts a reference. Returns true if it was the last one after the [`fold`](Self::fold).
    ///
    /// After true, no other thread uses the object that the reference kept alive, and the calling
    /// thread sees what every holder did with the object. After false, the block and the gate may
    /// be freed when this returns; that is why they are pointers.
    ///
    /// # Safety
    ///
    /// - `this` points to a valid `RefBlock`, and `gate` to a valid gate.
    /// - The caller owns a reference to count `i`, taken with this `gate` and `open`. The call
    ///   consumes it.
    /// - References keep the block and the gate alive: their owner frees neither before the end of
    ///   each count's life, nor before the guards of every `try_get` are gone.
    #[inline]
    #[must_use = "the object must be cleaned up after the last put"]
    pub unsafe fn put(this: *const Self, i: usize, gate: *const AtomicU64, open: u64) -> bool {
        // SAFETY: the reference to put keeps the block alive until it is put.
        let Self { words, cold } = unsafe { &*this };
        // SAFETY: the reference, which is not put yet, keeps the gate alive.
        let gate = unsafe { &*gate };
        // Another thread may free the block and the gate once the put is counted, while this thread
        // is still inside `try_add`. So `try_add` gets references to atomics, which may dangle after
        // their last use, and words that are not part of the block.
        if try_add(&words.words(i), &cold.counts[i].remote, gate, open, -1) {
            return false;
        }
        // SAFETY: the contract of this function; the reference is not put yet.
        unsafe { Self::put_atomic(this, i) }
    }

    /// Puts a reference if it is the only one after the [`fold`](Self::fold). Returns whether it did.
    ///
    /// After true, no other thread uses the object that the reference kept alive, and the calling
    /// thread sees what every holder did with the object. After false, the caller still owns its
    /// reference to count `i`.
    #[must_use = "the object must be cleaned up after the last put"]
    pub fn put_if_last(&self, i: usize) -> bool {
        // By invariant 2 the count is 1 only after the fold, and with no other holder.
        // Ordering: Acquire pairs with the Release in `put_atomic`, and with that of `fold`, which
        // passes on what it acquired; it carries what the other holders did with the object.
        // Relaxed on failure: nothing is read after it.
        let order = order!(Acquire, "put the last count: the other uses are done");
        self.cold.counts[i].atomic.compare_exchange(1, 0, order, Ordering::Relaxed).is_ok()
    }

    /// Closes count `i` and sums it up. Returns true if no reference is left, and false if a later
    /// [`put`](Self::put) will return true.
    ///
    /// After true, the calling thread sees what every holder did with the object. The owner calls
    /// this once per life, after it closed the gate and then called
    /// [`heavy_rseq`](crate::fence::heavy_rseq). One call of that is enough for any number of
    /// counts. Loads a word of every CPU.
    #[must_use = "the object must be cleaned up if no reference is left"]
    pub fn fold(&self, i: usize) -> bool {
        let Count { atomic, remote, folded } = &self.cold.counts[i];
        // Ordering: Relaxed, for the load and the store of `folded`; only the owner uses it.
        let mut sum = folded.load(Ordering::Relaxed);
        let counted = words::close_and_sum(&self.words.words(i), remote, &mut sum);
        folded.store(sum, Ordering::Relaxed);
        let delta = counted - BIAS;
        // Ordering: AcqRel. Acquire pairs with the Release in `put_atomic` of a put between the
        // closing of the gate and this; it carries what that holder did with the object. Release
        // pairs with the Acquire of the last put in `put_atomic` and `put_if_last`; it carries what
        // `close_and_sum` acquired from the holders.
        atomic.fetch_add(delta, Ordering::AcqRel) + delta == 0
    }

    /// Adds `delta` for the holder of a reference. Returns false if the atomic is the count.
    #[inline(always)]
    fn try_add(&self, i: usize, gate: &AtomicU64, open: u64, delta: i64) -> bool {
        try_add(&self.words.words(i), &self.cold.counts[i].remote, gate, open, delta)
    }

    /// Puts a reference in the atomic. Returns true if it was the last.
    ///
    /// # Safety
    ///
    /// That of [`put`](Self::put).
    #[cold]
    unsafe fn put_atomic(this: *const Self, i: usize) -> bool {
        // SAFETY: the reference to put keeps the block alive until it is put.
        let cold: &Cold = unsafe { &(*this).cold };
        // Ordering: AcqRel. Release pairs with the Acquire of the last put, here and in
        // `put_if_last`, and of `fold`; it carries what the holder of this reference did with the object.
        let before =
            cold.counts[i].atomic.fetch_sub(1, order!(AcqRel, "put a count: the use is done"));
        before == 1
    }
}

impl fmt::Debug for RefBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefBlock").field("counts", &Self::COUNTS).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(offlock_model)))]
#[path = "block_tests.rs"]
mod tests;
