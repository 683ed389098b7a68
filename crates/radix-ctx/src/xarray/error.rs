//! Errors: each gives back what was refused.

use std::error::Error;
use std::fmt;
use std::io;

use super::entry::Entry;

/// An error that has what was refused in every case, and `errno()`.
macro_rules! refusals {
    ($(
        $(#[$meta:meta])*
        $name:ident { $( $(#[$case_meta:meta])* $case:ident = $errno:ident, $text:literal; )+ }
    )+) => { $(
        $(#[$meta])*
        ///
        /// `Debug` and `Display` leave out what comes back, which need not have either.
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum $name<T> {
            $( $(#[$case_meta])* $case(T), )+
        }

        impl<T> $name<T> {
            /// What was refused.
            pub fn into_inner(self) -> T {
                match self { $( Self::$case(refused) )|+ => refused }
            }

            /// The error as C knows it.
            #[must_use]
            pub fn errno(&self) -> i32 {
                match self { $( Self::$case(_) => libc::$errno, )+ }
            }

            #[allow(dead_code, reason = "not every error is made of another")]
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
    /// Of [`XArray::store`](super::XArray::store).
    StoreError {
        /// The index is reserved, and stays so. `EEXIST`.
        Reserved = EEXIST, "the index is reserved";
        /// No memory for a node. `ENOMEM`.
        NoMemory = ENOMEM, "out of memory";
    }

    /// Of [`XArray::insert`](super::XArray::insert) and
    /// [`insert_with`](super::XArray::insert_with).
    InsertError {
        /// There is an entry, which stays. `EEXIST`.
        Present = EEXIST, "there is an entry already";
        /// The index is reserved, and stays so. `EEXIST`.
        Reserved = EEXIST, "the index is reserved";
        /// No memory for a node. `ENOMEM`.
        NoMemory = ENOMEM, "out of memory";
    }

    /// Of [`XArray::alloc`](super::XArray::alloc) and its like.
    AllocateError {
        /// Every index of the range is in use or reserved. `ENOSPC`.
        Exhausted = ENOSPC, "no index is free in the range";
        /// Somebody has ended the reservation by its index while the entry was being made. `ESTALE`.
        Lost = ESTALE, "the index is not reserved any more";
        /// No memory for a node. `ENOMEM`.
        NoMemory = ENOMEM, "out of memory";
    }

    /// Of [`Reservation::commit`](super::Reservation::commit).
    CommitError {
        /// Not reserved: somebody has released or filled it by its index. `ESTALE`.
        Lost = ESTALE, "the index is not reserved any more";
    }
}

impl<T> From<CommitError<T>> for InsertError<T> {
    /// A lost reservation is an entry that somebody else put there, or may have.
    fn from(error: CommitError<T>) -> Self {
        match error {
            CommitError::Lost(refused) => Self::Present(refused),
        }
    }
}

/// Of [`XArray::reserve`](super::XArray::reserve) and its like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReserveError {
    /// There is an entry. `EEXIST`.
    Present,
    /// It is reserved already. `EEXIST`.
    Reserved,
    /// Every index of the range is in use or reserved. `ENOSPC`.
    Exhausted,
    /// No memory for a node. `ENOMEM`.
    NoMemory,
}

impl ReserveError {
    /// The error as C knows it.
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
            Self::Present => "there is an entry already",
            Self::Reserved => "the index is reserved",
            Self::Exhausted => "no index is free in the range",
            Self::NoMemory => "out of memory",
        })
    }
}

impl Error for ReserveError {}

impl From<ReserveError> for io::Error {
    fn from(error: ReserveError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// Of [`XArray::compare_exchange`](super::XArray::compare_exchange): nothing has changed, and `new`
/// comes back.
#[non_exhaustive]
pub struct CompareExchangeError<'g, P: Entry> {
    /// What was refused.
    pub new: Option<P>,
    /// Why.
    pub reason: CompareExchangeReason<'g, P>,
}

/// Why [`XArray::compare_exchange`](super::XArray::compare_exchange) changed nothing.
#[non_exhaustive]
pub enum CompareExchangeReason<'g, P: Entry> {
    /// Another entry than the expected is there, or none. `EAGAIN`.
    Mismatch(Option<P::Ref<'g>>),
    /// None was expected, none is there, but the index is reserved. `EEXIST`.
    Reserved,
    /// No memory for a node. `ENOMEM`.
    NoMemory,
}

impl<P: Entry> CompareExchangeError<'_, P> {
    /// What was refused.
    pub fn into_inner(self) -> Option<P> {
        self.new
    }

    /// The error as C knows it.
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
            CompareExchangeReason::Mismatch(_) => "another entry than the expected is there",
            CompareExchangeReason::Reserved => "the index is reserved",
            CompareExchangeReason::NoMemory => "out of memory",
        })
    }
}

impl<P: Entry> Error for CompareExchangeError<'_, P> {}

impl<P: Entry> From<CompareExchangeError<'_, P>> for io::Error {
    fn from(error: CompareExchangeError<'_, P>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
