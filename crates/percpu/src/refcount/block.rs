//! Reference counts for an owner that has many objects, each with a state word of its own.
//!
//! A [`PercpuRef`](super::PercpuRef) has its gate, its closure and its mutex; an owner of a table
//! has a state word per slot that says which object lives there, and knows when it kills. So here
//! the state word is the gate: sections count while it reads what the owner calls open. What is
//! left of a count is 8 bytes per CPU and 24 more.
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
//! | | who | what |
//! |---|---|---|
//! | 1 | owner, alone | [`open`](RefBlock::open), then stores `open` in the gate (Release) |
//! | 2 | anyone, under a guard of the owner's making | [`try_get`](RefBlock::try_get) |
//! | | whoever has a reference | [`get_more`](RefBlock::get_more), [`put`](RefBlock::put) |
//! | 3 | owner | stores something else in the gate, calls [`heavy_rseq`](crate::fence::heavy_rseq) |
//! | 4 | owner, once | [`fold`](RefBlock::fold): true if no reference is left |
//! | | whoever has a reference | if it was false, one `put` returns true: the last |
//! | 5 | owner | waits until every guard of 2 is gone; then 1 again, or drops the block |
//!
//! # Invariants
//!
//! The number of references is the sum of `words` and `remote` since the last fold, plus `atomic`,
//! less `BIAS` from `open` to the fold.
//!
//! 1. A change of a word or of `remote` counts only while that is open, and in exactly one fold.
//!    A section commits only while the gate reads `open`, so none does after step 3; a fetch-and-add
//!    counts only if the value that it returns is open, and the fold closes by a swap.
//! 2. Between `open` and the fold `atomic` carries the bias, so nobody takes it to 0 there. After
//!    the fold it is the number of references, and nobody adds to it who has none: it is 0 after
//!    the fold itself or after one put, and stays.
//! 3. A void add (to what is closed) is never taken back. One by a `try_get` is over before step 5,
//!    and one by a holder before that holder's put: so each comes before the next `open`, which
//!    wipes it.
//! 4. A put that is not the last touches nothing behind the instruction that counts it.

use std::array;
use std::fmt;

use super::words::{self, BIAS, CLOSED, add_open};
use crate::error::AllocError;
use crate::rseq::section::{self, Refused};
use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use crate::sync::{cpu, mutant};
use crate::words::{BLOCK, WordBlock, Words};

/// [`RefBlock::COUNTS`] reference counts, each gated by a word of its owner's.
///
/// A reference costs what one of a [`PercpuRef`](super::PercpuRef) costs: a few instructions on
/// this CPU's own word where rseq sections run, and a fetch-and-add on it elsewhere. Everything but
/// [`try_new`](Self::try_new) and the drop is wait-free, without allocation.
///
/// Memory: 1,664 bytes, and 512 bytes for every CPU, from a pool.
///
/// Not covered by semantic versioning: for the other crates of the workspace.
///
/// # Panics
///
/// Each method that takes the number of a count, if that is not below [`COUNTS`](Self::COUNTS).
#[repr(C, align(128))]
pub struct RefBlock {
    // Read by every get and put, never written.
    words: WordBlock,
    cold: Cold,
}

/// What is written by threads without an id and after a kill, on other lines than what is read.
#[repr(align(128))]
struct Cold {
    counts: [Count; BLOCK],
}

/// The part of a count that is not in the words.
struct Count {
    atomic: AtomicI64,
    remote: AtomicU64,
    /// What the sections' words summed to at the last fold; only the owner has it.
    folded: AtomicU64,
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<RefBlock>() == 128 + BLOCK * 24);

impl RefBlock {
    /// How many there are in a block: 64, and 2 in a model.
    pub const COUNTS: usize = BLOCK;

    /// Makes a block of counts, all closed.
    ///
    /// Takes memory from a pool: blocks shortly while another thread does, and may map memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new() -> Result<Self, AllocError> {
        let block = Self {
            words: WordBlock::new()?,
            cold: Cold {
                counts: array::from_fn(|_| Count {
                    atomic: AtomicI64::new(0),
                    remote: AtomicU64::new(CLOSED),
                    folded: AtomicU64::new(0),
                }),
            },
        };
        if !section::available() {
            for i in 0..BLOCK {
                for word in block.words.words(i).iter() {
                    // Ordering: Relaxed; nobody else has the block.
                    word.store(CLOSED, Ordering::Relaxed);
                }
            }
        }
        Ok(block)
    }

    /// Prepares count `i` for a life that begins when the owner stores `open` in its gate, by a
    /// Release store, and with no reference beside the owner's interest in it.
    ///
    /// Nobody else uses the count meanwhile. It may be called again before the first reference.
    #[inline]
    pub fn open(&self, i: usize) {
        let Count { atomic, remote, .. } = &self.cold.counts[i];
        if !mutant("ref-block-open-leaves-it-closed") {
            if !section::available() {
                for word in self.words.words(i).iter() {
                    // Ordering: Relaxed, here and below; the owner's Release store in the gate
                    // carries all of it to the Acquire in `try_get`.
                    word.store(0, Ordering::Relaxed);
                }
            }
            remote.store(0, Ordering::Relaxed);
        }
        atomic.store(BIAS, Ordering::Relaxed);
    }

    /// Takes a reference, if `gate` reads `open` at the moment of counting.
    ///
    /// It then sees what the owner did before it stored `open` in the gate. The caller has a guard
    /// that keeps the owner from opening the count again during the call, and from dropping the
    /// block.
    #[inline]
    #[must_use = "a reference that was taken must be put"]
    pub fn try_get(&self, i: usize, gate: &AtomicU64, open: u64) -> bool {
        match section::add_while(gate, open, &self.words.words(i), 1) {
            Ok(_) => true,
            Err(Refused::Closed | Refused::Busy) => false,
            Err(Refused::NoCpu) => self.try_get_without_section(i, gate, open),
        }
    }

    fn try_get_without_section(&self, i: usize, gate: &AtomicU64, open: u64) -> bool {
        // Counted after the gate was closed, it still counts as taken before: at this load.
        // Ordering: Acquire pairs with the owner's Release store of `open`; it carries what `open`
        // stored, and what the owner did to the object.
        if gate.load(Ordering::Acquire) != open && !mutant("ref-block-ignores-the-gate") {
            return false;
        }
        count_without_section(&self.words.words(i), &self.cold.counts[i].remote, 1)
    }

    /// Takes a reference for somebody who has one: also after the gate was closed.
    #[inline]
    pub fn get_more(&self, i: usize, gate: &AtomicU64, open: u64) {
        if !self.try_add(i, gate, open, 1) {
            // Ordering: Relaxed, as for an `Arc`: a reference that exists keeps the count from
            // zero, and whoever gives the new one away orders that.
            self.cold.counts[i].atomic.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Puts a reference. True if it was the last after the [`fold`](Self::fold): then nobody else
    /// uses what it kept alive, and the caller sees what every holder did with it.
    ///
    /// After false, the block and the gate may be gone when this returns; that is why they are
    /// pointers.
    ///
    /// # Safety
    ///
    /// `this` points to a live `RefBlock`, and the caller owns a reference of its count `i`, taken
    /// with this `gate` and `open`, which the call uses up. References keep block and gate alive:
    /// whoever owns them frees neither before the end of each count's life, nor before the guards
    /// of every `try_get` are gone.
    #[inline]
    #[must_use = "who puts the last reference must clean up"]
    pub unsafe fn put(this: *const Self, i: usize, gate: *const AtomicU64, open: u64) -> bool {
        // Another thread may free block and gate once the put is counted, while this one is still
        // inside `count`. So `count` gets references to atomics, which promise nothing about the memory
        // after their last use, and words that are not part of the block.
        // SAFETY: the caller's reference keeps the block alive until it is put.
        let words = unsafe { (*this).words.words(i) };
        // SAFETY: the caller's reference, which is not put yet.
        let remote = unsafe { &(*this).cold.counts[i].remote };
        // SAFETY: the caller's reference keeps the gate alive, too.
        let gate = unsafe { &*gate };
        if count(&words, remote, gate, open, -1) {
            // SAFETY: none is needed but in a planted bug.
            return unsafe { Self::use_after_put(this, i) };
        }
        // SAFETY: the caller's reference, which is not put yet.
        unsafe { Self::put_atomic(this, i) }
    }

    /// Closes count `i` and sums it up: true if no reference is left, and then the caller sees what
    /// every holder did with theirs; false if a put will return true.
    ///
    /// Once per life. The caller closed the gate before, and then called
    /// [`heavy_rseq`](crate::fence::heavy_rseq): one call is enough for any number of counts. Loads a
    /// word of every CPU.
    #[must_use = "if none is left the caller must clean up"]
    pub fn fold(&self, i: usize) -> bool {
        let Count { atomic, remote, folded } = &self.cold.counts[i];
        // Ordering: Relaxed, both; the owner's alone.
        let mut sum = folded.load(Ordering::Relaxed);
        let counted = words::close(&self.words.words(i), remote, &mut sum);
        folded.store(sum, Ordering::Relaxed);
        let delta = counted - BIAS;
        // Ordering: AcqRel. Acquire pairs with the Release in `put_atomic`, of a put that came
        // between the closing of the gate and this; Release pairs with the Acquire of the last put,
        // there, and carries what `close` acquired from the holders.
        atomic.fetch_add(delta, Ordering::AcqRel) + delta == 0
    }

    /// Adds `delta` where this CPU counts; false if that is closed, and the atomic counts. For
    /// whoever has a reference.
    #[inline(always)]
    fn try_add(&self, i: usize, gate: &AtomicU64, open: u64, delta: i64) -> bool {
        count(&self.words.words(i), &self.cold.counts[i].remote, gate, open, delta)
    }

    /// # Safety
    ///
    /// As for [`put`](Self::put).
    #[cold]
    unsafe fn put_atomic(this: *const Self, i: usize) -> bool {
        // SAFETY: the caller's reference keeps it alive until it is put.
        let atomic = unsafe { &(*this).cold.counts[i].atomic };
        let order =
            if mutant("ref-block-put-is-relaxed") { Ordering::Relaxed } else { Ordering::AcqRel };
        // Ordering: AcqRel: Release pairs with the Acquire of the last put, here, and of the fold;
        // it carries what the holder of this reference did with the object.
        if atomic.fetch_sub(1, order) == 1 {
            return true;
        }
        // SAFETY: none is needed but in a planted bug.
        unsafe { Self::use_after_put(this, i) }
    }

    /// Nothing, behind the instruction that counted a put, but for a planted bug; often enough for
    /// others to free the block meanwhile.
    ///
    /// # Safety
    ///
    /// None is needed without the planted bug, which uses a block that may be gone.
    #[inline(always)]
    unsafe fn use_after_put(this: *const Self, i: usize) -> bool {
        mutant("ref-block-put-looks-back")
            && (0..16).any(|_| {
                // SAFETY: none, it is a bug.
                let atomic = unsafe { &(*this).cold.counts[i].atomic };
                atomic.load(Ordering::Relaxed) == 0
            })
    }
}

/// Adds `delta` where this CPU counts while `gate` reads `open`; false if that is closed.
#[inline(always)]
fn count(words: &Words, remote: &AtomicU64, gate: &AtomicU64, open: u64, delta: i64) -> bool {
    match section::add_while(gate, open, words, delta as u64) {
        Ok(_) => true,
        Err(Refused::Closed | Refused::Busy) => false,
        Err(Refused::NoCpu) => count_without_section(words, remote, delta),
    }
}

/// Without a section: on this CPU's word where no thread has sections, or on `remote`, for a thread
/// that must not touch the words, which other threads change by plain stores.
fn count_without_section(words: &Words, remote: &AtomicU64, delta: i64) -> bool {
    if section::available() {
        add_open(remote, delta)
    } else {
        add_open(words.slot(cpu::recent()), delta)
    }
}

impl fmt::Debug for RefBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefBlock").field("counts", &Self::COUNTS).finish_non_exhaustive()
    }
}

/// What may cross threads.
const _: () = {
    const fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<RefBlock>();
};

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
#[path = "block_tests.rs"]
mod tests;
