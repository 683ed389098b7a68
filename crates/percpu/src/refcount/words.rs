//! Opens, closes and changes the words of a [`PercpuRef`](crate::PercpuRef) or of one count of a
//! [`RefBlock`](crate::RefBlock).
//!
//! Invariant 1 of the [module above](super) holds for every function here. Where sections run, only
//! sections change the words, and a gate closes them. Elsewhere, and always in `remote`, the value of
//! a word says whether the word is open.

use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::{order, step};

use crate::cpu;
use crate::rseq::section::{self, Refused};
use crate::words::Words;

/// Added to the atomic of a count while its words are open. References and puts before a fold cannot
/// cancel it: there are fewer than 2^60 of them.
pub(super) const BIAS: i64 = 1 << 61;

/// Stored in a word or in `remote` to close it. Void adds may change the value afterwards.
pub(super) const CLOSED: u64 = 1 << 62;

/// Words below this value are open. Neither references nor void adds reach it: it is halfway to
/// [`CLOSED`].
const OPEN_LIMIT: i64 = 1 << 61;

/// Adds `delta` to the word of this CPU, if the value of `gate` is `open_value`, or to `remote`.
/// Returns false, and counts nothing, if the word or `remote` is closed. Wait-free.
#[inline(always)]
pub(super) fn try_add(
    words: &Words,
    remote: &AtomicU64,
    gate: &AtomicU64,
    open_value: u64,
    delta: i64,
) -> bool {
    match section::add(gate, open_value, words, delta as u64) {
        Ok(_) => true,
        Err(Refused::Closed | Refused::OutOfRange) => false,
        Err(Refused::NoCpu) => try_add_without_section(words, remote, delta),
    }
}

/// Adds `delta` without a section. Returns false if the word is closed.
///
/// Where sections run, the calling thread adds to `remote`, because sections change the words by
/// plain stores: it has no CPU id, or it decides just now whether sections run. Elsewhere it adds to
/// the word of this CPU.
#[inline]
pub(super) fn try_add_without_section(words: &Words, remote: &AtomicU64, delta: i64) -> bool {
    if section::available() {
        add_if_open(remote, delta)
    } else {
        add_if_open(words.slot(cpu::recent_cpu()), delta)
    }
}

/// Adds `delta` to a word, and returns whether the word was open. An add to a closed word is void.
#[inline]
fn add_if_open(word: &AtomicU64, delta: i64) -> bool {
    // Ordering: AcqRel. Release, in a put, pairs with the Acquire of the swap in `close_and_sum`; it
    // carries what the holder did with the object. Acquire, in a void add, pairs with the
    // Release of that swap, for the accesses of the calling thread to the atomic after it.
    (word.fetch_add(delta as u64, Ordering::AcqRel) as i64) < OPEN_LIMIT
}

/// Closes the words and `remote`, and returns their sum since they were opened.
///
/// Where sections run, the gate must be closed and no section may still be able to commit. The words
/// then keep their values, because only sections may change a word: `folded` is their sum at the last
/// fold, and this function updates it.
pub(super) fn close_and_sum(words: &Words, remote: &AtomicU64, folded: &mut u64) -> i64 {
    let counted = if section::available() {
        // Ordering: Acquire pairs with the Release of a section's store; it carries what the
        // holders did before their puts. No model checks it: `heavy_rseq` of a model locks the mutex
        // of each virtual CPU, and that carries it too.
        let mut sum =
            words.iter().fold(0, |sum: u64, word| sum.wrapping_add(word.load(Ordering::Acquire)));
        let before = std::mem::replace(folded, sum);
        step!("fold: only since the last fold", sum = sum.wrapping_sub(before));
        sum
    } else {
        words.iter().fold(0, |sum: u64, word| {
            // Ordering: AcqRel. Acquire pairs with the Release in `add_if_open`; it carries what the
            // holders did before their puts. Release pairs with the Acquire of a void add, for the
            // accesses of its thread to the atomic after it.
            sum.wrapping_add(word.swap(CLOSED, order!(AcqRel, "fold: the holders of the word")))
        })
    };
    // Ordering: AcqRel. Acquire pairs with the Release in `add_if_open`; it carries what the holders
    // did before their puts. Release pairs with the Acquire of a void add, for the accesses of its
    // thread to the atomic after it.
    counted.wrapping_add(remote.swap(CLOSED, Ordering::AcqRel)) as i64
}
