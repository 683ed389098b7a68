//! What names a context: where it is, and which of all that were ever there.

use std::error::Error;
use std::fmt;
use std::io;
use std::num::NonZeroU64;
use std::str::FromStr;

/// The name of a context in a [`CtxTable`](super::CtxTable): an index, and the generation of the
/// context that is, or was, at that index.
///
/// ```text
///   63   62   61          32   31          0
///   | 0 | 0 | generation    | index         |
/// ```
///
/// A generation is never 0 and an index is used again only with another one, so an id never names
/// two contexts of one table. Of two tables it may: a table does not know the ids of others.
/// [`to_bits`](Self::to_bits) fits wherever 64 bits are handed through, as in the `user_data` of an
/// I/O request. Ids order by generation first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Id(NonZeroU64);

const _: () = assert!(size_of::<Option<Id>>() == 8);

/// Bits of a generation.
pub(super) const GENERATION_BITS: u32 = 30;
/// The largest of them. No context has it: it is what comes after the last.
pub(super) const MAX_GENERATION: u32 = (1 << GENERATION_BITS) - 1;

impl Id {
    /// That of the first context at an index.
    pub(super) const FIRST_GENERATION: u32 = 1;

    /// # Panics
    ///
    /// Panics if the generation is 0.
    pub(super) fn new(index: u32, generation: u32) -> Self {
        debug_assert!(generation < 1 << GENERATION_BITS);
        let bits = u64::from(generation) << 32 | u64::from(index);
        Self(NonZeroU64::new(bits).expect("a generation is not 0"))
    }

    /// The id that a live state is.
    #[inline(always)]
    pub(super) fn from_live(state: u64) -> Self {
        Self(NonZeroU64::new(state).expect("a live state has a generation"))
    }

    /// The id as a number; never 0.
    #[inline(always)]
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0.get()
    }

    /// The id that has these bits. `None` if no table ever hands out such an id; any other number
    /// may be given to a table, which tells whether it names something.
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

    /// Where the context is.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0.get() as u32
    }

    /// Grows with each context at that index, by one or more.
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

/// `index.generation`, as in `17.3`.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index(), self.generation())
    }
}

/// The text is not what an [`Id`] prints, or not that of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParseIdError {}

impl ParseIdError {
    /// The error as C knows it: `EINVAL`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EINVAL
    }
}

impl fmt::Display for ParseIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not an id: `index.generation` is wanted")
    }
}

impl Error for ParseIdError {}

impl From<ParseIdError> for io::Error {
    fn from(error: ParseIdError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// Of what [`Display`](fmt::Display) prints.
impl FromStr for Id {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let parse = |text: &str| text.parse::<u32>().map_err(|_| ParseIdError {});
        let (index, generation) = text.split_once('.').ok_or(ParseIdError {})?;
        let bits = u64::from(parse(generation)?) << 32 | u64::from(parse(index)?);
        Self::from_bits(bits).ok_or(ParseIdError {})
    }
}

impl From<Id> for u64 {
    fn from(id: Id) -> Self {
        id.to_bits()
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_an_id_does_not_parse() {
        for text in ["", "1", "1.", ".1", "1.0", "-1.1", "1.1.1", "4294967296.1", "0.1073741824"] {
            assert_eq!(text.parse::<Id>(), Err(ParseIdError {}), "{text}");
        }
    }

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
            assert_eq!(id.to_string().parse(), Ok(id));
        }
    }
}
