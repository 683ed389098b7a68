//! The operations of both kinds of count on the words of the CPUs: add, close and fold, open.
//!
//! They keep invariant 1 of the [module above](super). Where sections run, only sections change the
//! words, and a gate closes them. Elsewhere, and always in `remote`, the value of a word says
//! whether the word is open.

use crate::rseq::section::{self, Refused};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{cpu, order, step};
use crate::words::Words;

/// Added to the atomic of a count while its words are open. No number of references (2^59 at most),
/// nor of puts before a fold, can cancel it.
pub(super) const BIAS: i64 = 1 << 61;

/// The value of a closed word or `remote`, plus the void adds since it was closed.
pub(super) const CLOSED: u64 = 1 << 62;

/// Adds `delta` to the word of this CPU while `gate` reads `open`, or to `remote`. Returns false if
/// that is closed, so that the add does not count. Wait-free.
#[inline(always)]
pub(super) fn count(
    words: &Words,
    remote: &AtomicU64,
    gate: &AtomicU64,
    open: u64,
    delta: i64,
) -> bool {
    match section::add(gate, open, words, delta as u64) {
        Ok(_) => true,
        Err(Refused::Closed | Refused::Busy) => false,
        Err(Refused::NoCpu) => count_without_section(words, remote, delta),
    }
}

/// Adds `delta` without a section. Returns false if the word is closed.
///
/// Where sections run, the calling thread has no CPU id and adds to `remote`, because sections
/// change the words by plain stores. Elsewhere it adds to the word of this CPU.
#[inline]
pub(super) fn count_without_section(words: &Words, remote: &AtomicU64, delta: i64) -> bool {
    if section::available() {
        add_open(remote, delta)
    } else {
        add_open(words.slot(cpu::recent()), delta)
    }
}

/// Adds `delta` to a word, and returns whether the word was open. No number of references, nor of
/// void adds, reaches the boundary between open and closed.
#[inline]
fn add_open(word: &AtomicU64, delta: i64) -> bool {
    // Ordering: AcqRel. Release, in a put, pairs with the Acquire of the swap in `close`; it
    // carries what the holder did with the object. Acquire, in a get, pairs with the Release in
    // `open`; it carries what the thread that called `resurrect` or `reinit` did to the object.
    (word.fetch_add(delta as u64, Ordering::AcqRel) as i64) < 1 << 61
}

/// Closes the words and `remote`, and returns their sum since they were opened.
///
/// Where sections run, the gate must be closed and no section may still be able to commit. Only
/// sections may change the words, so they keep their values; `folded` is their sum at the last
/// fold, and this function updates it.
pub(super) fn close(words: &Words, remote: &AtomicU64, folded: &mut u64) -> i64 {
    let counted = if section::available() {
        // Ordering: Acquire pairs with the Release of a section's store; it carries what the
        // holders did before their puts.
        let mut sum =
            words.iter().fold(0, |sum: u64, word| sum.wrapping_add(word.load(Ordering::Acquire)));
        let before = std::mem::replace(folded, sum);
        step!("fold: only since the last fold", sum = sum.wrapping_sub(before));
        sum
    } else {
        words.iter().fold(0, |sum: u64, word| {
            // Ordering: AcqRel. Acquire pairs with the Release in `add_open`; it carries what the
            // holders did before their puts. Release pairs with the Acquire of an `add_open` that
            // finds the word closed; it carries what the closing thread did before.
            sum.wrapping_add(word.swap(CLOSED, order!(AcqRel, "fold: the holders of the word")))
        })
    };
    // Ordering: AcqRel. Acquire pairs with the Release in `add_open`; it carries what the holders
    // did before their puts. Release pairs with the Acquire of an `add_open` that finds `remote`
    // closed; it carries what the closing thread did before.
    counted.wrapping_add(remote.swap(CLOSED, Ordering::AcqRel)) as i64
}

/// Opens `remote`, and the words where no sections run.
///
/// It swaps instead of storing, because loom may order a void add that read the value before a
/// plain store after that store.
pub(super) fn open(words: &Words, remote: &AtomicU64) {
    if !section::available() {
        for word in words.iter() {
            // Ordering: Release pairs with the Acquire in `add_open`; it carries what the calling
            // thread did to the object.
            word.swap(0, Ordering::Release);
        }
    }
    // Ordering: Release pairs with the Acquire in `add_open`; it carries what the calling thread
    // did to the object.
    remote.swap(0, Ordering::Release);
}
