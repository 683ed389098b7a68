//! Entries: the types that fit the word of an array.

use std::fmt;
use std::ptr::NonNull;

use percpu::rcu::{Batch, Owned, Unlinked};

use crate::tree::Word;

/// A type that an [`XArray`](super::XArray) can hold: [`Owned`], [`Value`] or `&'static T`.
///
/// | type | memory of an entry | what a removal returns |
/// |---|---|---|
/// | [`Owned<T>`](Owned) | 8 bytes, and its box | [`Unlinked<T>`](Unlinked), which is dropped after a grace period |
/// | [`Value`] | 8 bytes | the entry |
/// | `&'static T` | 8 bytes | the entry |
///
/// ```
/// use radix_ctx::rcu::Owned;
/// use radix_ctx::xarray::{Value, XArray};
///
/// let boxes = XArray::<Owned<String>>::new();
/// boxes.store(0, Owned::new("in a box".to_string()))?;
/// let numbers = XArray::<Value>::new();
/// numbers.store(0, Value::from(7))?;
/// let statics = XArray::<&'static String>::new();
/// statics.store(0, Box::leak(Box::new("for ever".to_string())))?;
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// The trait is sealed. The `T` of a `&'static T` needs a size above 0 and an alignment of at least 4.
/// Other types do not compile:
///
/// ```compile_fail
/// let names = radix_ctx::XArray::<&'static u8>::new();
/// names.store(0, &7);
/// ```
pub trait Entry: sealed::Words {}

pub(super) mod sealed {
    use super::*;

    /// Conversions between an entry and its word.
    ///
    /// # Safety
    ///
    /// A word from `into_word` is not null and not [`RESERVED`], and its two lowest bits are not 10.
    pub unsafe trait Words: Sized + Send + Sync + 'static {
        /// The form in which readers get the entry.
        type Ref<'g>: Copy;
        /// The form in which a removal returns the entry. Readers may still use the entry then.
        type Unlinked;

        /// Converts the entry into a word.
        fn into_word(self) -> Word;

        /// Converts a word back into its entry.
        ///
        /// # Safety
        ///
        /// `word` is from `into_word`, and is converted back once. No reader has the entry.
        unsafe fn from_word(word: Word) -> Self;

        /// Converts a word back into an entry that earlier readers may still use.
        ///
        /// # Safety
        ///
        /// `word` is from `into_word`, and is converted back once. No new reader can find it, and each
        /// reader that has found it is in an RCU section.
        unsafe fn unlinked(word: Word) -> Self::Unlinked;

        /// Returns the entry of a word to a reader.
        ///
        /// # Safety
        ///
        /// `word` is from `into_word`. During `'g` it stays in the array, or a guard or the lock keeps
        /// the entry alive.
        unsafe fn borrow<'g>(word: Word) -> Self::Ref<'g>;

        /// Returns whether `other` refers to the entry of `word`.
        ///
        /// # Safety
        ///
        /// The conditions of `borrow` hold during this call.
        unsafe fn is(word: Word, other: &Self::Ref<'_>) -> bool;

        /// Adds the entry to a batch, which drops it after a grace period.
        fn retire(out: Self::Unlinked, batch: &mut Batch);
    }
}

pub(super) use sealed::Words;

/// The word of a reserved index. It differs from each entry's word: no object has address 4, and the
/// words of values are odd.
pub(super) const RESERVED: Word = std::ptr::without_provenance_mut(4);

/// Returns whether the word holds no entry: it is null or [`RESERVED`]. One comparison.
#[inline(always)]
pub(super) fn is_none(word: Word) -> bool {
    word.addr() & !RESERVED.addr() == 0
}

/// The two lowest bits, which are 0 in the word of a pointer.
const TAG: usize = 0b11;

/// Converts a word back into a pointer.
///
/// # Safety
///
/// `word` is from the `into_word` of a pointer.
#[inline(always)]
unsafe fn at(word: Word) -> NonNull<()> {
    debug_assert!(!is_none(word) && word.addr() & TAG == 0);
    // SAFETY: the word is from `into_word`, which never returns null.
    unsafe { NonNull::new_unchecked(word) }
}

impl<T: Send + Sync + 'static> Entry for Owned<T> {}

// SAFETY: the word is a pointer with clear low bits to a node of at least 16 bytes, so it is neither null
// nor 4.
unsafe impl<T: Send + Sync + 'static> Words for Owned<T> {
    type Ref<'g> = &'g T;
    type Unlinked = Unlinked<T>;

    #[inline]
    fn into_word(self) -> Word {
        self.into_raw().as_ptr()
    }

    #[inline]
    unsafe fn from_word(word: Word) -> Self {
        // SAFETY: by the contract of this function the word is from `into_word`.
        let at = unsafe { at(word) };
        // SAFETY: the word is converted back once, and no reader has the node.
        unsafe { Owned::from_raw(at) }
    }

    #[inline]
    unsafe fn unlinked(word: Word) -> Unlinked<T> {
        // SAFETY: by the contract of this function the word is from `into_word`.
        let at = unsafe { at(word) };
        // SAFETY: the word is converted back once, and only readers in RCU sections have the node.
        unsafe { Unlinked::from_raw(at) }
    }

    #[inline(always)]
    unsafe fn borrow<'g>(word: Word) -> &'g T {
        // SAFETY: by the contract of this function the word is from `into_word`.
        let at = unsafe { at(word) };
        // SAFETY: the array, a guard or the lock keeps the node for `'g`; values in nodes never change.
        unsafe { Owned::borrow_raw(at) }
    }

    #[inline]
    unsafe fn is(word: Word, other: &&T) -> bool {
        // SAFETY: by the contract of this function the node stays during this call.
        let here: *const T = unsafe { Self::borrow(word) };
        std::ptr::eq(here, *other)
    }

    fn retire(out: Unlinked<T>, batch: &mut Batch) {
        out.retire_with(batch);
    }
}

impl<T: Sync> Entry for &'static T {}

// SAFETY: the word is a pointer with clear low bits (the alignment) to an object of at least one byte, so
// it is neither null nor 4.
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
        // SAFETY: by the contract of this function the word is from `into_word`.
        let at = unsafe { at(word) };
        // SAFETY: `into_word` made it of a `&'static T`, which is valid for ever and may be copied.
        unsafe { at.cast().as_ref() }
    }

    #[inline]
    unsafe fn unlinked(word: Word) -> Self {
        // SAFETY: the word is from `into_word`, and a `&'static T` may be copied.
        unsafe { Self::from_word(word) }
    }

    #[inline(always)]
    unsafe fn borrow<'g>(word: Word) -> Self::Ref<'g> {
        // SAFETY: the word is from `into_word`, and a `&'static T` may be copied.
        unsafe { Self::from_word(word) }
    }

    #[inline]
    unsafe fn is(word: Word, other: &Self) -> bool {
        std::ptr::eq(word.cast(), *other)
    }

    fn retire(_: Self, _: &mut Batch) {}
}

/// A number from 0 to 2^63 - 1, which an array stores without a box.
///
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
    /// The highest number: 2^63 - 1.
    pub const MAX: Self = Self(u64::MAX >> 1);

    /// Makes a value of a number. Returns `None` if the number is above [`Value::MAX`].
    #[inline]
    #[must_use]
    pub const fn new(value: u64) -> Option<Self> {
        if value <= Self::MAX.0 { Some(Self(value)) } else { None }
    }

    /// Returns the number.
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

// SAFETY: the word is odd.
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
