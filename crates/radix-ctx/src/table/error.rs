//! The errors of a table.

use std::error::Error;
use std::fmt;
use std::io;

use percpu::AllocError;
use percpu::rcu::SynchronizeError;

/// The reason why an id names no live context. Maps to `EINVAL`.
///
/// ```
/// use radix_ctx::{CtxTable, Id, LookupError};
///
/// let table = CtxTable::new();
/// let id = table.insert("alice").unwrap();
/// table.remove(id)?;
/// assert_eq!(table.with(id, |_| ()), Err(LookupError::Stale));
/// let forged = Id::from_bits(7 << 32 | 100).unwrap();
/// assert_eq!(table.with(forged, |_| ()), Err(LookupError::NotFound));
/// # Ok::<(), LookupError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LookupError {
    /// The context was removed. Another context may have the index now.
    Stale,
    /// The table never had a context of this id: the id is forged, of another table, or only reserved.
    NotFound,
}

/// The reason why a counted reference was not taken. Maps to `EINVAL` or `ENOMEM`.
///
/// ```
/// use radix_ctx::{CtxTable, GetRefError, LookupError};
///
/// let table = CtxTable::new();
/// let id = table.insert("alice").unwrap();
/// table.remove(id)?;
/// let refused = table.get_ref(id).unwrap_err();
/// assert_eq!(refused, GetRefError::Lookup(LookupError::Stale));
/// # Ok::<(), LookupError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GetRefError {
    /// The id names no live context.
    Lookup(LookupError),
    /// There is no memory for the counts of 64 neighbouring contexts. Only the first reference to one of
    /// them allocates.
    Alloc(AllocError),
}

/// The reason why a context was not removed. Maps to `EINVAL`.
///
/// ```
/// use radix_ctx::{CtxTable, RemoveError};
///
/// let table = CtxTable::new();
/// let id = table.insert("alice").unwrap();
/// table.remove(id)?;
/// assert_eq!(table.remove(id).err(), Some(RemoveError::Stale));
/// # Ok::<(), RemoveError>(())
/// ```
pub type RemoveError = LookupError;

/// The reason why a context was not inserted. The call changed nothing.
///
/// ```
/// use radix_ctx::{CtxTable, InsertRefused};
///
/// let table = CtxTable::builder().max_index(0).max_weight(10).build()?;
/// let too_heavy = table.insert_weighted("alice", 11).unwrap_err().reason;
/// assert_eq!(too_heavy, InsertRefused::TooHeavy { weight: 11, limit: 10 });
/// table.insert("alice").unwrap();
/// let exhausted = table.insert("bob").unwrap_err().reason;
/// assert_eq!(exhausted, InsertRefused::Exhausted { pending: 0 });
/// # Ok::<(), radix_ctx::AllocError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InsertRefused {
    /// The weight of the context is above the limit of the sum. Maps to `EINVAL`.
    TooHeavy {
        /// The weight of the context.
        weight: u64,
        /// The limit of the table: [`max_weight`](super::Builder::max_weight).
        limit: u64,
    },
    /// The number of live contexts, or the sum of their weights, has reached its limit. Maps to `EAGAIN`.
    Quota,
    /// Every index of the range is in use. Maps to `ENOSPC`.
    Exhausted {
        /// The number of indexes of removed contexts, which become vacant when no reader and no reference
        /// is left.
        pending: u64,
    },
    /// The range has no index. Maps to `EINVAL`.
    NoRange,
    /// There is no memory. Maps to `ENOMEM`.
    Alloc(AllocError),
    /// The calling thread holds an RCU guard or is dropping a context of the table, so a wait for a vacant
    /// index would never end. Maps to `EDEADLK`.
    Deadlock,
    /// The table is closed: [`CtxTable::close`](super::CtxTable::close). Maps to `ESHUTDOWN`.
    Closed,
}

/// The reason why a wait failed.
///
/// ```
/// use std::time::Duration;
///
/// use radix_ctx::{CtxTable, WaitError, rcu};
///
/// let table = CtxTable::new();
/// let id = table.insert("alice")?;
/// let reference = table.get_ref(id)?;
/// let removal = table.remove(id)?;
/// assert_eq!(removal.wait_timeout(Duration::from_millis(1)), Err(WaitError::TimedOut));
///
/// let guard = rcu::pin();
/// assert_eq!(removal.wait(), Err(WaitError::Pinned));
/// # drop((guard, reference));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitError {
    /// The timeout has passed. Maps to `ETIMEDOUT`.
    TimedOut,
    /// The calling thread holds an RCU guard, so the wait would never end. Maps to `EDEADLK`.
    Pinned,
    /// The calling thread is dropping a context of the same table, so the wait would never end. Maps to
    /// `EDEADLK`.
    InDrop,
    /// The context was removed during the wait. Maps to `EINVAL`.
    Removed,
}

/// The error of an insert. Returns the value.
///
/// ```
/// use radix_ctx::{CtxTable, InsertRefused};
///
/// let table = CtxTable::builder().max_contexts(0).build()?;
/// let refused = table.insert("alice").unwrap_err();
/// assert_eq!((refused.value, refused.reason), ("alice", InsertRefused::Quota));
/// # Ok::<(), radix_ctx::AllocError>(())
/// ```
pub struct InsertError<T> {
    /// The value, or the closure that would have made it.
    pub value: T,
    /// The reason of the refusal.
    pub reason: InsertRefused,
}

impl<T> InsertError<T> {
    pub(super) fn new(value: T, reason: InsertRefused) -> Self {
        Self { value, reason }
    }

    /// Returns the matching errno value.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.reason.errno()
    }

    /// Returns the same error with another value.
    pub(super) fn map<U>(self, f: impl FnOnce(T) -> U) -> InsertError<U> {
        InsertError { value: f(self.value), reason: self.reason }
    }
}

/// Omits the value, which need not be `Debug`.
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
    /// Returns the errno of this error: `EINVAL`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EINVAL
    }
}

impl fmt::Display for LookupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stale => "the context was removed",
            Self::NotFound => "the table never had a context of this id",
        })
    }
}

impl Error for LookupError {}

impl GetRefError {
    /// Returns the matching errno value.
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
            Self::Alloc(_) => f.write_str("no memory for the counts of references"),
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
    /// Returns the matching errno value.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::TooHeavy { .. } | Self::NoRange => libc::EINVAL,
            Self::Quota => libc::EAGAIN,
            Self::Exhausted { .. } => libc::ENOSPC,
            Self::Alloc(alloc) => alloc.errno(),
            Self::Deadlock => libc::EDEADLK,
            Self::Closed => libc::ESHUTDOWN,
        }
    }
}

impl fmt::Display for InsertRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooHeavy { weight, limit } => {
                write!(f, "weight {weight} is above {limit}, the limit of all contexts together")
            }
            Self::Quota => {
                f.write_str("the number or the weight of the contexts has reached its limit")
            }
            Self::Exhausted { pending: 0 } => f.write_str("no index is vacant"),
            Self::Exhausted { pending } => {
                write!(f, "no index is vacant until readers leave {pending} removed contexts")
            }
            Self::NoRange => f.write_str("the range has no index of the table"),
            Self::Alloc(_) => f.write_str("no memory for a context"),
            Self::Deadlock => f.write_str("the calling thread would wait for itself"),
            Self::Closed => f.write_str("the table is closed"),
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
    /// Returns the matching errno value.
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
            Self::TimedOut => f.write_str("the timeout has passed"),
            Self::Pinned => {
                f.write_str("the calling thread holds an RCU guard and would wait for itself")
            }
            Self::InDrop => f.write_str("the calling thread is dropping a context of the table"),
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
    /// Converts the error of a reference to a context that was just inserted: its id is live, so memory is
    /// missing.
    fn from(_: GetRefError) -> Self {
        Self::Alloc(AllocError::new())
    }
}

/// Drops the value, and returns the reason.
impl<T> From<InsertError<T>> for InsertRefused {
    fn from(error: InsertError<T>) -> Self {
        error.reason
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
