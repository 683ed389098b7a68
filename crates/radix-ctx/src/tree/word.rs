//! The words of a tree, and its dimensions.

use std::ptr;

/// Bits of a key per level. A model has small nodes, so that few steps make a high tree.
pub(crate) const BITS: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 6 };
/// Slots per node.
pub(crate) const FANOUT: usize = 1 << BITS;
pub(super) const MASK: u64 = FANOUT as u64 - 1;
/// The mask of a node's bits, one for each slot.
pub(super) const ALL: u64 = u64::MAX >> (64 - FANOUT);
pub(crate) const MAX_HEIGHT: usize = 64_u32.div_ceil(BITS) as usize;

/// An untyped pointer, whose low bits give it a meaning. The [module](super) lists the meanings.
pub(crate) type Word = *mut ();

/// Makes the word of a floor.
#[inline]
pub(crate) fn floor_word(floor: u64) -> Word {
    debug_assert!(floor <= u64::MAX >> 1);
    ptr::without_provenance_mut((floor << 1 | 1) as usize)
}

/// Returns the word of a key that was never present: the lowest floor. Null is no word, so one test tells a
/// floor from a node.
pub(super) const fn absent() -> Word {
    ptr::without_provenance_mut(1)
}

/// Returns the floor in a word, or 0 if the word is not a floor.
#[inline]
pub(crate) fn floor_in(word: Word) -> u64 {
    if word.addr() & 1 == 1 { word.addr() as u64 >> 1 } else { 0 }
}

/// Returns whether a word is an entry or a node. The word is not a tagged root.
#[inline(always)]
pub(super) fn is_present(word: Word) -> bool {
    word.addr() & 1 == 0
}

/// Returns the number of levels that a tree needs for `key`. 0 means that the root word is enough.
pub(super) fn height_for(key: u64) -> u32 {
    (u64::BITS - key.leading_zeros()).div_ceil(BITS)
}
