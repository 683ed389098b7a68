//! What an array holds: one word each.

use std::fmt;
use std::ptr::NonNull;

use percpu::rcu::{Batch, Owned, Unlinked};

use crate::tree::Word;

/// What fits an [`XArray`](super::XArray)'s word. Sealed: [`Owned`], [`Value`], and `&'static T`.
///
/// | | memory per entry | comes out as |
/// |---|---|---|
/// | [`Owned<T>`](Owned) | 8 bytes, and the node that it is | [`Unlinked<T>`](Unlinked): dropped after a grace period |
/// | [`Value`] | 8 bytes | itself |
/// | `&'static T` | 8 bytes | itself |
///
/// A `T` behind a `&'static T` is not of size 0, and its alignment is 4 or more; anything else does not
/// compile:
///
/// ```compile_fail
/// let names = radix_ctx::XArray::<&'static u8>::new();
/// names.store(0, &7);
/// ```
pub trait Entry: sealed::Words {}

pub(super) mod sealed {
    use super::*;

    /// # Safety
    ///
    /// A word from `into_word` is not null, is not [`RESERVED`], and has not 10 as its two lowest bits.
    pub unsafe trait Words: Sized + Send + Sync + 'static {
        /// What a reader gets.
        type Ref<'g>: Copy;
        /// What comes out of the array while readers may be there.
        type Unlinked;

        fn into_word(self) -> Word;

        /// # Safety
        ///
        /// From `into_word`, taken back by this call only; no reader has it.
        unsafe fn from_word(word: Word) -> Self;

        /// # Safety
        ///
        /// As for `from_word`, but for readers that came before: they are in RCU sections.
        unsafe fn unlinked(word: Word) -> Self::Unlinked;

        /// # Safety
        ///
        /// From `into_word`, and during `'g` it is in the array, or held up by a guard or the lock.
        unsafe fn borrow<'g>(word: Word) -> Self::Ref<'g>;

        /// Whether the reference is to this very entry.
        ///
        /// # Safety
        ///
        /// As for `borrow`.
        unsafe fn is(word: Word, other: &Self::Ref<'_>) -> bool;

        /// Has the entry dropped when nobody can be reading it, together with others.
        fn retire(out: Self::Unlinked, batch: &mut Batch);
    }
}

pub(super) use sealed::Words;

/// The word of a reserved index. No entry's: no object is at that address, and values are odd.
pub(super) const RESERVED: Word = std::ptr::without_provenance_mut(4);

/// Whether there is neither an entry nor a reservation in the word: both cost one comparison.
#[inline(always)]
pub(super) fn is_none(word: Word) -> bool {
    word.addr() & !RESERVED.addr() == 0
}

/// Bits that tell a pointer from a value and from a node.
const TAG: usize = 0b11;

/// # Safety
///
/// `word` is from the `into_word` of a pointer.
#[inline(always)]
unsafe fn at(word: Word) -> NonNull<()> {
    debug_assert!(!is_none(word) && word.addr() & TAG == 0);
    // SAFETY: `into_word` never gives null: the promise of `Words`.
    unsafe { NonNull::new_unchecked(word) }
}

impl<T: Send + Sync + 'static> Entry for Owned<T> {}

// SAFETY: a pointer with its two lowest bits clear, to a node of 16 bytes and more, so neither null nor
// at address 4.
unsafe impl<T: Send + Sync + 'static> Words for Owned<T> {
    type Ref<'g> = &'g T;
    type Unlinked = Unlinked<T>;

    #[inline]
    fn into_word(self) -> Word {
        self.into_raw().as_ptr()
    }

    #[inline]
    unsafe fn from_word(word: Word) -> Self {
        // SAFETY: from `into_word`, says the caller.
        let at = unsafe { at(word) };
        // SAFETY: the caller's.
        unsafe { Owned::from_raw(at) }
    }

    #[inline]
    unsafe fn unlinked(word: Word) -> Unlinked<T> {
        // SAFETY: from `into_word`, says the caller.
        let at = unsafe { at(word) };
        // SAFETY: the caller's.
        unsafe { Unlinked::from_raw(at) }
    }

    #[inline(always)]
    unsafe fn borrow<'g>(word: Word) -> &'g T {
        // SAFETY: from `into_word`, says the caller.
        let at = unsafe { at(word) };
        // SAFETY: the caller's.
        unsafe { Owned::borrow_raw(at) }
    }

    #[inline]
    unsafe fn is(word: Word, other: &&T) -> bool {
        // SAFETY: the caller's.
        let here: *const T = unsafe { Self::borrow(word) };
        std::ptr::eq(here, *other)
    }

    fn retire(out: Unlinked<T>, batch: &mut Batch) {
        out.retire_with(batch);
    }
}

impl<T: Sync> Entry for &'static T {}

// SAFETY: a pointer with its two lowest bits clear (the alignment), to an object of at least one byte,
// so neither null nor at address 4.
unsafe impl<T: Sync> Words for &'static T {
    type Ref<'g> = &'static T;
    type Unlinked = &'static T;

    #[inline]
    fn into_word(self) -> Word {
        const { assert!(align_of::<T>() > TAG, "an entry is aligned to 4 bytes or more") };
        const { assert!(size_of::<T>() > 0, "an entry is not of size 0") };
        std::ptr::from_ref(self).cast_mut().cast()
    }

    #[inline]
    unsafe fn from_word(word: Word) -> Self {
        // SAFETY: from `into_word`, says the caller.
        let at = unsafe { at(word) };
        // SAFETY: and that was of a `&'static T`.
        unsafe { at.cast().as_ref() }
    }

    #[inline]
    unsafe fn unlinked(word: Word) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::from_word(word) }
    }

    #[inline(always)]
    unsafe fn borrow<'g>(word: Word) -> Self::Ref<'g> {
        // SAFETY: the caller's.
        unsafe { Self::from_word(word) }
    }

    #[inline]
    unsafe fn is(word: Word, other: &Self) -> bool {
        std::ptr::eq(word.cast(), *other)
    }

    fn retire(_: Self, _: &mut Batch) {}
}

/// A number in the array's word itself: 0 to 2^63 - 1.
///
/// # Examples
///
/// ```
/// use radix_ctx::xarray::Value;
///
/// assert_eq!(Value::new(7).map(Value::get), Some(7));
/// assert_eq!(Value::new(u64::MAX), None);
/// assert_eq!(Value::from(7_u32), Value::new(7).unwrap());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value(u64);

impl Value {
    /// The highest.
    pub const MAX: Self = Self(u64::MAX >> 1);

    /// `None` if it is above [`Value::MAX`].
    #[inline]
    #[must_use]
    pub const fn new(value: u64) -> Option<Self> {
        if value <= Self::MAX.0 { Some(Self(value)) } else { None }
    }

    /// The number.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self(value.into())
    }
}

impl From<Value> for u64 {
    fn from(value: Value) -> Self {
        value.0
    }
}

impl Entry for Value {}

// SAFETY: odd.
unsafe impl Words for Value {
    type Ref<'g> = Value;
    type Unlinked = Value;

    #[inline(always)]
    fn into_word(self) -> Word {
        std::ptr::without_provenance_mut((self.0 << 1 | 1) as usize)
    }

    #[inline(always)]
    unsafe fn from_word(word: Word) -> Self {
        Self(word.addr() as u64 >> 1)
    }

    #[inline(always)]
    unsafe fn unlinked(word: Word) -> Self {
        Self(word.addr() as u64 >> 1)
    }

    #[inline(always)]
    unsafe fn borrow<'g>(word: Word) -> Self::Ref<'g> {
        Self(word.addr() as u64 >> 1)
    }

    #[inline]
    unsafe fn is(word: Word, other: &Self) -> bool {
        Self(word.addr() as u64 >> 1) == *other
    }

    fn retire(_: Self, _: &mut Batch) {}
}
