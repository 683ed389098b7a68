//! The errors of a table. Each converts into an [`io::Error`] with the errno that its variants name.

use std::error::Error;
use std::{fmt, io};

use offlock_percpu::AllocError;
use offlock_percpu::rcu::SynchronizeError;
use offlock_sync::impl_error;

/// The reason why an id names no live context. `EINVAL`.
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
    /// The table never had a context of this id: the id is forged, or of another table.
    NotFound,
}

/// The reason why a counted reference was not taken.
///
/// ```
/// use radix_ctx::{CtxTable, GetRefError, LookupError};
///
/// let table = CtxTable::new();
/// let id = table.insert("alice").unwrap();
/// table.remove(id)?;
/// assert_eq!(table.get_ref(id).unwrap_err(), GetRefError::Lookup(LookupError::Stale));
/// # Ok::<(), LookupError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GetRefError {
    /// The id names no live context. `EINVAL`.
    Lookup(LookupError),
    /// There is no memory for the counters of 64 neighbouring contexts. Only the first reference to one of
    /// them allocates. `ENOMEM`.
    Alloc(AllocError),
}

/// The reason why a context was not inserted. The call changed nothing.
///
/// ```
/// use radix_ctx::{CtxTable, InsertRefused};
///
/// let table = CtxTable::builder().max_index(0).build();
/// table.insert("alice").unwrap();
/// let exhausted = table.insert("bob").unwrap_err().reason;
/// assert_eq!(exhausted, InsertRefused::Exhausted { pending: 0 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InsertRefused {
    /// The number of live contexts has reached its limit. `EAGAIN`.
    Quota {
        /// The limit: [`max_contexts`](crate::Builder::max_contexts).
        limit: u64,
    },
    /// Every index is in use. `ENOSPC`.
    Exhausted {
        /// The number of indexes of removed contexts, which become vacant when no reader and no reference
        /// is left.
        pending: u64,
    },
    /// There is no memory. `ENOMEM`.
    Alloc(AllocError),
}

/// The error of an insert.
///
/// ```
/// use radix_ctx::{CtxTable, InsertRefused};
///
/// let table = CtxTable::builder().max_contexts(0).build();
/// let refused = table.insert("alice").unwrap_err();
/// assert_eq!((refused.value, refused.reason), ("alice", InsertRefused::Quota { limit: 0 }));
/// ```
pub struct InsertError<T> {
    /// The value that was not inserted.
    pub value: T,
    /// The reason of the refusal.
    pub reason: InsertRefused,
}

/// The reason why a wait failed.
///
/// ```
/// use std::time::Instant;
///
/// use radix_ctx::{CtxTable, WaitError, rcu};
///
/// let table = CtxTable::new();
/// let id = table.insert("alice")?;
/// let reference = table.get_ref(id)?;
/// let removal = table.remove(id)?;
/// assert_eq!(removal.wait_deadline(Instant::now()), Err(WaitError::TimedOut));
///
/// let guard = rcu::pin();
/// assert_eq!(removal.wait(), Err(WaitError::Pinned));
/// # drop((guard, reference));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline has passed. `ETIMEDOUT`.
    TimedOut,
    /// The calling thread holds an RCU guard, so the wait would never end. `EDEADLK`.
    Pinned,
    /// The calling thread is dropping a context of the same table, so the wait would never end.
    /// `EDEADLK`.
    InDrop,
}

impl_error! { LookupError {
    Self::Stale => EINVAL, "the context was removed";
    Self::NotFound => EINVAL, "the table never had a context of this id";
} }

impl_error! { GetRefError {
    Self::Lookup(lookup) => EINVAL, "{lookup}";
    Self::Alloc(_) => ENOMEM, "no memory for the counters of references";
} }

impl_error! { InsertRefused {
    Self::Quota { limit } => EAGAIN, "the table has {limit} contexts, which is its limit";
    Self::Exhausted { pending: 0 } => ENOSPC, "no index is vacant";
    Self::Exhausted { pending } =>
        ENOSPC, "no index is vacant until readers leave {pending} removed contexts";
    Self::Alloc(_) => ENOMEM, "no memory for a context";
} }

impl_error! { WaitError {
    Self::TimedOut => ETIMEDOUT, "the deadline has passed";
    Self::Pinned => EDEADLK, "the calling thread holds an RCU guard and would wait for itself";
    Self::InDrop => EDEADLK, "the calling thread is dropping a context of the table";
} }

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

impl<T> Error for InsertError<T> {}

impl From<LookupError> for GetRefError {
    fn from(error: LookupError) -> Self {
        Self::Lookup(error)
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

impl<T> From<InsertError<T>> for io::Error {
    fn from(error: InsertError<T>) -> Self {
        error.reason.into()
    }
}
