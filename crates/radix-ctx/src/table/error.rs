//! What is refused, and why; with what was to be done with it.

use std::error::Error;
use std::fmt;
use std::io;

use percpu::AllocError;
use percpu::rcu::SynchronizeError;

/// Why an id leads to nothing. Maps to `EINVAL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LookupError {
    /// It named a context that was removed; the index may belong to another by now.
    Stale,
    /// It never named a context of this table: a forged id, or one that is only reserved.
    NotFound,
}

/// Why there is no counted reference. Maps to `EINVAL` and `ENOMEM`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GetRefError {
    /// The id leads to nothing.
    Lookup(LookupError),
    /// No memory for the counts of this and the neighbouring contexts: only the first reference to
    /// one of them needs any.
    Alloc(AllocError),
}

/// Why a context was not removed. Maps to `EINVAL`.
pub type RemoveError = LookupError;

/// Why there is no new context. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InsertRefused {
    /// One context weighs more than all may. Maps to `EINVAL`.
    TooHeavy,
    /// The table's contexts are as many, or weigh as much, as they may. Maps to `EAGAIN`.
    Quota,
    /// Every index is in use. Maps to `ENOSPC`.
    Exhausted {
        /// How many of them belong to contexts that were removed, and come free once no reader is
        /// left and no reference.
        pending: u64,
    },
    /// The empty range. Maps to `EINVAL`.
    NoRange,
    /// Out of memory. Maps to `ENOMEM`.
    Alloc(AllocError),
    /// [`insert_wait`](super::CtxTable::insert_wait) would wait for itself. Maps to `EDEADLK`.
    Deadlock,
}

/// Why a wait ended without what it was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitError {
    /// The time is over. Maps to `ETIMEDOUT`.
    TimedOut,
    /// This thread holds an RCU guard, so the wait would be for itself. Maps to `EDEADLK`.
    Pinned,
    /// This thread is dropping a context of the same table: what it waits for comes after that. Maps
    /// to `EDEADLK`.
    InDrop,
    /// The context was removed while somebody waited for something of it. Maps to `EINVAL`.
    Removed,
}

/// A value that was not inserted, and why.
pub struct InsertError<T> {
    /// What was to be inserted, or to make it.
    pub value: T,
    /// Why it was not.
    pub reason: InsertRefused,
}

impl<T> InsertError<T> {
    pub(super) fn new(value: T, reason: InsertRefused) -> Self {
        Self { value, reason }
    }

    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.reason.errno()
    }

    /// The same refusal of something else.
    pub(super) fn map<U>(self, f: impl FnOnce(T) -> U) -> InsertError<U> {
        InsertError { value: f(self.value), reason: self.reason }
    }
}

/// Without the value, which need not be `Debug`.
impl<T> fmt::Debug for InsertError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InsertError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for InsertError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl<T> Error for InsertError<T> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.reason.source()
    }
}

impl<T> From<InsertError<T>> for io::Error {
    fn from(error: InsertError<T>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

impl LookupError {
    /// The error as C knows it: `EINVAL`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EINVAL
    }
}

impl fmt::Display for LookupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stale => "the context was removed",
            Self::NotFound => "no context ever had this id",
        })
    }
}

impl Error for LookupError {}

impl GetRefError {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Lookup(lookup) => lookup.errno(),
            Self::Alloc(alloc) => alloc.errno(),
        }
    }
}

impl fmt::Display for GetRefError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lookup(lookup) => lookup.fmt(f),
            Self::Alloc(_) => f.write_str("out of memory for the counts of references"),
        }
    }
}

impl Error for GetRefError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Lookup(lookup) => Some(lookup),
            Self::Alloc(alloc) => Some(alloc),
        }
    }
}

impl InsertRefused {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::TooHeavy | Self::NoRange => libc::EINVAL,
            Self::Quota => libc::EAGAIN,
            Self::Exhausted { .. } => libc::ENOSPC,
            Self::Alloc(alloc) => alloc.errno(),
            Self::Deadlock => libc::EDEADLK,
        }
    }
}

impl fmt::Display for InsertRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooHeavy => f.write_str("it weighs more than all contexts may"),
            Self::Quota => f.write_str("the quota is used up"),
            Self::Exhausted { pending: 0 } => f.write_str("no id is left"),
            Self::Exhausted { pending } => {
                write!(f, "no id is left until {pending} removed contexts are out of use")
            }
            Self::NoRange => f.write_str("the range is empty"),
            Self::Alloc(_) => f.write_str("out of memory for a context"),
            Self::Deadlock => f.write_str("it would wait for itself"),
        }
    }
}

impl Error for InsertRefused {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Alloc(alloc) => Some(alloc),
            _ => None,
        }
    }
}

impl WaitError {
    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::TimedOut => libc::ETIMEDOUT,
            Self::Pinned | Self::InDrop => libc::EDEADLK,
            Self::Removed => libc::EINVAL,
        }
    }
}

impl fmt::Display for WaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut => f.write_str("the time is over"),
            Self::Pinned => f.write_str("this thread is a reader and would wait for itself"),
            Self::InDrop => f.write_str("this thread is dropping a context of the table"),
            Self::Removed => f.write_str("the context was removed"),
        }
    }
}

impl Error for WaitError {}

impl From<LookupError> for GetRefError {
    fn from(error: LookupError) -> Self {
        Self::Lookup(error)
    }
}

impl From<GetRefError> for InsertRefused {
    /// The id is the caller's own, so only memory can be missing.
    fn from(_: GetRefError) -> Self {
        Self::Alloc(AllocError::new())
    }
}

impl From<AllocError> for InsertRefused {
    fn from(error: AllocError) -> Self {
        Self::Alloc(error)
    }
}

impl From<SynchronizeError> for WaitError {
    fn from(_: SynchronizeError) -> Self {
        Self::Pinned
    }
}

macro_rules! into_io_error {
    ($($error:ty),+ $(,)?) => {$(
        impl From<$error> for io::Error {
            fn from(error: $error) -> Self {
                Self::from_raw_os_error(error.errno())
            }
        }
    )+};
}

into_io_error!(LookupError, GetRefError, InsertRefused, WaitError);
