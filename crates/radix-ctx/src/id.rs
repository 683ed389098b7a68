//! The id of a context: an index and a generation.

use std::fmt;
use std::num::NonZeroU64;

/// The id of a context in a [`CtxTable`](crate::CtxTable): the index of its slot, and the generation
/// that tells it from the other contexts at that index.
///
/// ```text
///   63   62   61          32   31          0
///   | 0 | 0 | generation    | index         |
/// ```
///
/// A generation is never 0, and an index is used again only with a higher one, so an id never names two
/// contexts of one table. An id of one table may name a context of another table.
/// [`to_bits`](Self::to_bits) fits into a field of 64 bits, such as the `user_data` of an I/O request.
/// Ids order by generation first.
///
/// ```
/// use radix_ctx::{CtxTable, Id};
///
/// let table = CtxTable::new();
/// let id = table.insert("a session")?;
/// let user_data: u64 = id.to_bits();
/// assert_eq!(Id::from_bits(user_data), Some(id));
/// assert_eq!(id.to_string(), "0.1"); // index 0, its first context
/// # Ok::<(), radix_ctx::InsertError<&str>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Id(NonZeroU64);

const _: () = assert!(size_of::<Option<Id>>() == 8);

/// The number of bits of a generation.
pub(super) const GENERATION_BITS: u32 = 30;
/// The largest number of that many bits. No context has it: it is the next generation after the last.
pub(super) const MAX_GENERATION: u32 = (1 << GENERATION_BITS) - 1;

impl Id {
    /// The generation of the first context at an index.
    pub(super) const FIRST_GENERATION: u32 = 1;

    /// Makes an id.
    ///
    /// # Panics
    ///
    /// Panics if the generation is 0.
    pub(super) fn new(index: u32, generation: u32) -> Self {
        debug_assert!(generation < 1 << GENERATION_BITS);
        let bits = u64::from(generation) << 32 | u64::from(index);
        Self(NonZeroU64::new(bits).expect("a generation is not 0"))
    }

    /// Returns the id in the state of a live slot.
    #[inline(always)]
    pub(super) fn from_live(state: u64) -> Self {
        Self(NonZeroU64::new(state).expect("a live state has a generation"))
    }

    /// Returns the id as a number, which is never 0.
    #[inline(always)]
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0.get()
    }

    /// Returns the id with these bits, or `None` if the generation in them is 0 or needs more than 30 bits.
    /// Lookups of any other number are safe: they fail unless the id is live. Ids are easy to guess, so a
    /// program that takes one from a client checks whose context it is.
    #[inline]
    #[must_use]
    pub const fn from_bits(bits: u64) -> Option<Self> {
        let generation = bits >> 32;
        if generation == 0 || generation >> GENERATION_BITS != 0 {
            return None;
        }
        match NonZeroU64::new(bits) {
            Some(bits) => Some(Self(bits)),
            None => None,
        }
    }

    /// Returns the index of the context.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0.get() as u32
    }

    /// Returns the generation, which grows with each context at the index by one or more.
    #[inline(always)]
    #[must_use]
    pub const fn generation(self) -> u32 {
        (self.0.get() >> 32) as u32
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Id({self})")
    }
}

/// Writes `index.generation`, as in `17.3`.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index(), self.generation())
    }
}

impl From<Id> for u64 {
    fn from(id: Id) -> Self {
        id.to_bits()
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;

    #[test]
    fn inv12_bits_make_an_id_only_if_a_table_could_have_made_them() {
        for bits in [0, 1, u64::from(u32::MAX), 1 << 62, 1 << 63, u64::MAX] {
            assert_eq!(Id::from_bits(bits), None, "{bits:#x}");
        }
        for (index, generation) in [(0, 1), (7, 3), (u32::MAX, (1 << GENERATION_BITS) - 1)] {
            let id = Id::new(index, generation);
            assert_eq!(Id::from_bits(id.to_bits()), Some(id));
            assert_eq!((id.index(), id.generation()), (index, generation));
            assert_eq!(id.to_string(), format!("{index}.{generation}"));
        }
    }
}
