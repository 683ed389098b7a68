//! What is refused, and why; with what was to be done with it.

use std::error::Error;
use std::fmt;
use std::io;

use percpu::AllocError;
use percpu::lglock::LockError;

/// Why an entry was not added. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// The list is closed. Maps to `ESHUTDOWN`.
    Closed,
    /// The item is on a list already: intrusive lists only. Maps to `EEXIST`.
    Linked,
    /// The item's link was made for another domain: intrusive lists only. Maps to `EXDEV`.
    OtherDomain,
    /// Out of memory, or of the 2^31 places of a slot. Maps to `ENOMEM`.
    Alloc(AllocError),
    /// The slot could not be locked: this thread holds it already, in a walk or a snapshot
    /// (`EDEADLK`); or there is no such CPU (`EINVAL`).
    Lock(LockError),
}

impl Refused {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Closed => libc::ESHUTDOWN,
            Self::Linked => libc::EEXIST,
            Self::OtherDomain => libc::EXDEV,
            Self::Alloc(error) => error.errno(),
            Self::Lock(error) => error.errno(),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the list is closed"),
            Self::Linked => f.write_str("the item is on a list already"),
            Self::OtherDomain => f.write_str("the item's link is of another domain"),
            Self::Alloc(error) => error.fmt(f),
            Self::Lock(error) => error.fmt(f),
        }
    }
}

impl Error for Refused {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Alloc(error) => Some(error),
            Self::Lock(error) => Some(error),
            _ => None,
        }
    }
}

impl From<AllocError> for Refused {
    fn from(error: AllocError) -> Self {
        Self::Alloc(error)
    }
}

impl From<LockError> for Refused {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl From<Refused> for io::Error {
    fn from(error: Refused) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// A value that was not added, and why.
pub struct InsertError<T> {
    /// What was to be added.
    pub value: T,
    /// Why it was not.
    pub reason: Refused,
}

/// An entry that was not removed, and why: it is on its list as before.
pub struct RemoveError<E> {
    /// The entry.
    pub entry: E,
    /// Why it was not removed.
    pub reason: LockError,
}

macro_rules! refusal {
    ($name:ident<$what:ident>) => {
        impl<$what> $name<$what> {
            /// The error as C knows it.
            #[must_use]
            pub fn errno(&self) -> i32 {
                self.reason.errno()
            }
        }

        /// Without what is given back, which need not be `Debug`.
        impl<$what> fmt::Debug for $name<$what> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("reason", &self.reason)
                    .finish_non_exhaustive()
            }
        }

        impl<$what> fmt::Display for $name<$what> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.reason.fmt(f)
            }
        }

        impl<$what> Error for $name<$what> {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                self.reason.source()
            }
        }

        impl<$what> From<$name<$what>> for io::Error {
            fn from(error: $name<$what>) -> Self {
                Self::from_raw_os_error(error.errno())
            }
        }
    };
}

/// Without the value.
impl<T> From<InsertError<T>> for Refused {
    fn from(error: InsertError<T>) -> Self {
        error.reason
    }
}

/// Without the entry, which is dropped: that removes it, now or later.
impl<E> From<RemoveError<E>> for Refused {
    fn from(error: RemoveError<E>) -> Self {
        error.reason.into()
    }
}

refusal!(InsertError<T>);
refusal!(RemoveError<E>);
