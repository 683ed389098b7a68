//! Errors of an array. Each returns the entry that was refused.

use std::error::Error;
use std::fmt;
use std::io;

use super::entry::Entry;

/// Defines error enums whose variants all return the refused entry.
macro_rules! refusals {
    ($(
        $(#[$meta:meta])*
        $name:ident { $( $(#[$case_meta:meta])* $case:ident = $errno:ident, $text:literal; )+ }
    )+) => { $(
        $(#[$meta])*
        ///
        /// `Debug` and `Display` omit the entry, which needs neither of them.
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $name<T> {
            $( $(#[$case_meta])* $case(T), )+
        }

        impl<T> $name<T> {
            /// Returns the entry, or the closure that would have made it.
            pub fn into_inner(self) -> T {
                match self { $( Self::$case(refused) )|+ => refused }
            }

            /// Returns the matching errno value.
            #[must_use]
            pub fn errno(&self) -> i32 {
                match self { $( Self::$case(_) => libc::$errno, )+ }
            }

            #[allow(dead_code, reason = "some of the errors are never converted")]
            pub(super) fn map<U>(self, f: impl FnOnce(T) -> U) -> $name<U> {
                match self { $( Self::$case(refused) => $name::$case(f(refused)), )+ }
            }
        }

        impl<T> fmt::Display for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( Self::$case(_) => $text, )+ })
            }
        }

        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( Self::$case(_) => stringify!($case), )+ })
            }
        }

        impl<T> Error for $name<T> {}

        impl<T> From<$name<T>> for io::Error {
            fn from(error: $name<T>) -> Self {
                Self::from_raw_os_error(error.errno())
            }
        }
    )+ };
}

refusals! {
    /// The error of [`XArray::store`](super::XArray::store). Returns the entry; the array has not changed.
    ///
    /// ```
    /// use radix_ctx::xarray::{StoreError, Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// let reservation = array.reserve(3)?;
    /// let refused = array.store(3, 7.into()).unwrap_err();
    /// assert_eq!(refused, StoreError::Reserved(7.into()));
    /// assert_eq!(refused.into_inner().get(), 7);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    StoreError {
        /// The index is reserved. Maps to `EEXIST`.
        Reserved = EEXIST, "the index is reserved";
        /// There is no memory for a node. Maps to `ENOMEM`.
        NoMemory = ENOMEM, "no memory for a node of the array";
    }

    /// The error of [`XArray::insert`](super::XArray::insert) and
    /// [`insert_with`](super::XArray::insert_with). Returns the entry; the array has not changed.
    ///
    /// ```
    /// use radix_ctx::xarray::{InsertError, Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// array.insert(3, 7.into())?;
    /// match array.insert(3, 8.into()) {
    ///     Err(InsertError::Present(refused)) => assert_eq!(refused.get(), 8),
    ///     other => panic!("{other:?}"),
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    InsertError {
        /// The index has an entry. Maps to `EEXIST`.
        Present = EEXIST, "the index has an entry";
        /// The index is reserved. Maps to `EEXIST`.
        Reserved = EEXIST, "the index is reserved";
        /// There is no memory for a node. Maps to `ENOMEM`.
        NoMemory = ENOMEM, "no memory for a node of the array";
    }

    /// The error of [`XArray::alloc`](super::XArray::alloc) and its variants. Returns the entry.
    ///
    /// ```
    /// use radix_ctx::xarray::{AllocateError, Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// array.alloc(0..1, 7.into())?;
    /// assert_eq!(array.alloc(0..1, 8.into()), Err(AllocateError::Exhausted(8.into())));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    AllocateError {
        /// Every index of the range has an entry or is reserved. Maps to `ENOSPC`.
        Exhausted = ENOSPC, "every index of the range has an entry or is reserved";
        /// Another call released or filled the reserved index while the entry was made. Maps to `ESTALE`.
        Lost = ESTALE, "the index is not reserved any more";
        /// There is no memory for a node. Maps to `ENOMEM`.
        NoMemory = ENOMEM, "no memory for a node of the array";
    }

    /// The error of [`Reservation::commit`](super::Reservation::commit) and
    /// [`XArray::commit`](super::XArray::commit). Returns the entry.
    ///
    /// ```
    /// use radix_ctx::xarray::{CommitError, Value, XArray};
    ///
    /// let array = XArray::<Value>::new();
    /// assert_eq!(array.commit(3, 7.into()), Err(CommitError::Lost(7.into())));
    /// ```
    CommitError {
        /// The index is not reserved, because another call has released or filled it. Maps to `ESTALE`.
        Lost = ESTALE, "the index is not reserved any more";
    }
}

impl<T> From<CommitError<T>> for InsertError<T> {
    /// Converts a lost reservation into [`Present`](InsertError::Present): another call has put an entry
    /// there, or could have.
    fn from(error: CommitError<T>) -> Self {
        match error {
            CommitError::Lost(refused) => Self::Present(refused),
        }
    }
}

/// The error of [`XArray::reserve`](super::XArray::reserve) and
/// [`reserve_lowest`](super::XArray::reserve_lowest). The array has not changed.
///
/// ```
/// use radix_ctx::xarray::{ReserveError, Value, XArray};
///
/// let array = XArray::<Value>::new();
/// array.store(3, 7.into())?;
/// assert_eq!(array.reserve(3).unwrap_err(), ReserveError::Present);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReserveError {
    /// The index has an entry. Maps to `EEXIST`.
    Present,
    /// The index is reserved already. Maps to `EEXIST`.
    Reserved,
    /// Every index of the range has an entry or is reserved. Maps to `ENOSPC`.
    Exhausted,
    /// There is no memory for a node. Maps to `ENOMEM`.
    NoMemory,
}

impl ReserveError {
    /// Returns the matching errno value.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Present | Self::Reserved => libc::EEXIST,
            Self::Exhausted => libc::ENOSPC,
            Self::NoMemory => libc::ENOMEM,
        }
    }
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Present => "the index has an entry",
            Self::Reserved => "the index is reserved",
            Self::Exhausted => "every index of the range has an entry or is reserved",
            Self::NoMemory => "no memory for a node of the array",
        })
    }
}

impl Error for ReserveError {}

impl From<ReserveError> for io::Error {
    fn from(error: ReserveError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// The error of [`XArray::compare_exchange`](super::XArray::compare_exchange). Returns the new entry; the
/// array has not changed.
///
/// ```
/// use radix_ctx::rcu;
/// use radix_ctx::xarray::{CompareExchangeReason, Value, XArray};
///
/// let array = XArray::<Value>::new();
/// array.store(3, 7.into())?;
/// let guard = rcu::pin();
/// let refused = array.compare_exchange(3, Some(6.into()), Some(8.into()), &guard).unwrap_err();
/// assert_eq!(refused.new, Some(8.into()));
/// match refused.reason {
///     CompareExchangeReason::Mismatch(current) => assert_eq!(current, Some(7.into())),
///     other => panic!("{other:?}"),
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[non_exhaustive]
pub struct CompareExchangeError<'g, P: Entry> {
    /// The new entry.
    pub new: Option<P>,
    /// The reason of the refusal.
    pub reason: CompareExchangeReason<'g, P>,
}

/// The reason why [`XArray::compare_exchange`](super::XArray::compare_exchange) changed nothing.
///
/// ```
/// use radix_ctx::rcu;
/// use radix_ctx::xarray::{CompareExchangeReason, Value, XArray};
///
/// let array = XArray::<Value>::new();
/// let _reservation = array.reserve(3)?;
/// let guard = rcu::pin();
/// let refused = array.compare_exchange(3, None, Some(8.into()), &guard).unwrap_err();
/// assert!(matches!(refused.reason, CompareExchangeReason::Reserved));
/// # Ok::<(), std::io::Error>(())
/// ```
#[non_exhaustive]
pub enum CompareExchangeReason<'g, P: Entry> {
    /// The index has another entry than the expected one, or none. Holds the current entry. Maps to
    /// `EAGAIN`.
    Mismatch(Option<P::Ref<'g>>),
    /// No entry was expected and there is none, but the index is reserved. Maps to `EEXIST`.
    Reserved,
    /// There is no memory for a node. Maps to `ENOMEM`.
    NoMemory,
}

impl<P: Entry> CompareExchangeError<'_, P> {
    /// Returns the new entry.
    pub fn into_inner(self) -> Option<P> {
        self.new
    }

    /// Returns the matching errno value.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self.reason {
            CompareExchangeReason::Mismatch(_) => libc::EAGAIN,
            CompareExchangeReason::Reserved => libc::EEXIST,
            CompareExchangeReason::NoMemory => libc::ENOMEM,
        }
    }
}

impl<P: Entry> fmt::Debug for CompareExchangeReason<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mismatch(_) => "Mismatch",
            Self::Reserved => "Reserved",
            Self::NoMemory => "NoMemory",
        })
    }
}

impl<P: Entry> fmt::Debug for CompareExchangeError<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompareExchangeError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<P: Entry> fmt::Display for CompareExchangeError<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.reason {
            CompareExchangeReason::Mismatch(_) => {
                "the index has another entry than the expected one, or none"
            }
            CompareExchangeReason::Reserved => "the index is reserved",
            CompareExchangeReason::NoMemory => "no memory for a node of the array",
        })
    }
}

impl<P: Entry> Error for CompareExchangeError<'_, P> {}

impl<P: Entry> From<CompareExchangeError<'_, P>> for io::Error {
    fn from(error: CompareExchangeError<'_, P>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
