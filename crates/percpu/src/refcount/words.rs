//! What both kinds of count do with the words that are not shared: count, close and fold, open.
//!
//! Invariant 1 of the [module above](super) is kept here. Where sections run, the words are changed
//! by them alone and a gate closes them; elsewhere, and always in `remote`, a word says itself
//! whether it counts.

use crate::rseq::section;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mutant;
use crate::words::Words;

/// Stands in the atomic of a count while its words are open: far from what any number of references
/// (2^59 at most) or of puts before their folds can reach.
pub(super) const BIAS: i64 = 1 << 61;

/// A word, or `remote`, that counts no more, give or take the void adds that it took since.
pub(super) const CLOSED: u64 = 1 << 62;

/// True of a word that counts: no number of references, nor of void adds, bridges the distance.
#[inline(always)]
pub(super) fn is_open(word: u64) -> bool {
    (word as i64) < 1 << 61
}

/// Adds `delta` to a word, and tells whether it was open, so that the add counts. Wait-free.
#[inline]
pub(super) fn add_open(word: &AtomicU64, delta: i64) -> bool {
    // Ordering: AcqRel. Release, in a put, pairs with the Acquire of the swap in `close`; it
    // carries what the holder did. Acquire, in a get, pairs with the Release in `open`; it carries
    // what the caller of `resurrect` or `reinit` did.
    is_open(word.fetch_add(delta as u64, Ordering::AcqRel))
}

/// Closes the words and `remote`, and returns what they counted since they were opened.
///
/// Where sections run, none may be able to commit any more; `folded` is what the words summed to at
/// the last fold, and is brought up to date. They are never set back to 0: only sections may change
/// them.
pub(super) fn close(words: &Words, remote: &AtomicU64, folded: &mut u64) -> i64 {
    let counted = if section::available() {
        // Ordering: Acquire pairs with the Release of a section's store; it carries what the
        // holders did before their puts.
        let sum =
            words.iter().fold(0, |sum: u64, word| sum.wrapping_add(word.load(Ordering::Acquire)));
        let before = std::mem::replace(folded, sum);
        if mutant("refcount-fold-counts-a-life-twice") { sum } else { sum.wrapping_sub(before) }
    } else {
        words.iter().fold(0, |sum: u64, word| {
            if mutant("refcount-close-by-load-and-store") {
                let seen = word.load(Ordering::Acquire);
                word.store(CLOSED, Ordering::Release);
                return sum.wrapping_add(seen);
            }
            if mutant("refcount-fold-leaves-it-open") {
                return sum.wrapping_add(word.swap(0, Ordering::AcqRel));
            }
            let order = if mutant("refcount-fold-is-relaxed") {
                Ordering::Relaxed
            } else {
                Ordering::AcqRel
            };
            // Ordering: AcqRel. Acquire pairs with the Release in `add_open`; it carries what the
            // holders did before their puts. Release: whoever then finds it closed sees why.
            sum.wrapping_add(word.swap(CLOSED, order))
        })
    };
    // Ordering: as for the swap above.
    counted.wrapping_add(remote.swap(CLOSED, Ordering::AcqRel)) as i64
}

/// Opens the words, where they say it themselves, and `remote`.
///
/// By swaps, as loom lets a void add slip behind a plain store that followed what it read.
pub(super) fn open(words: &Words, remote: &AtomicU64) {
    if !section::available() {
        for word in words.iter() {
            // Ordering: Release pairs with the Acquire in `add_open`; it carries what the
            // caller did to the object.
            word.swap(0, Ordering::Release);
        }
    }
    // Ordering: as above.
    remote.swap(0, Ordering::Release);
}
