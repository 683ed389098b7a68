//! The words of a tree, and the numbers that fix its shape.

use std::ptr;

/// Bits of a key per level. A model has small nodes, to get high trees by few steps.
pub(crate) const BITS: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 6 };
/// Slots of a node.
pub(crate) const FANOUT: usize = 1 << BITS;
pub(super) const MASK: u64 = FANOUT as u64 - 1;
/// A bit for each slot.
pub(super) const ALL: u64 = u64::MAX >> (64 - FANOUT);
pub(crate) const MAX_HEIGHT: usize = 64_u32.div_ceil(BITS) as usize;
/// Marks of an entry.
pub(crate) const MARKS: usize = 3;

/// A pointer without a type: see the module's page.
pub(crate) type Word = *mut ();

/// The word of a floor.
#[inline]
pub(crate) fn floor_word(floor: u64) -> Word {
    debug_assert!(floor <= u64::MAX >> 1);
    ptr::without_provenance_mut((floor << 1 | 1) as usize)
}

/// The word of a key that was never there: null, or the lowest floor, so that one test tells a floor
/// from a node.
pub(super) const fn absent<const FLOORS: bool>() -> Word {
    if FLOORS { ptr::without_provenance_mut(1) } else { ptr::null_mut() }
}

/// What a word says as a floor; 0 if it is none.
#[inline]
pub(crate) fn floor_in(word: Word) -> u64 {
    if word.addr() & 1 == 1 { word.addr() as u64 >> 1 } else { 0 }
}

/// Whether the word is an entry or a node, given that it is in a place for one of them.
#[inline(always)]
pub(super) fn is_present<const FLOORS: bool>(word: Word) -> bool {
    if FLOORS { word.addr() & 1 == 0 } else { !word.is_null() }
}

/// The levels that a tree needs to have room for `key`; 0: the root word will do.
pub(super) fn height_for(key: u64) -> u32 {
    (u64::BITS - key.leading_zeros()).div_ceil(BITS)
}
