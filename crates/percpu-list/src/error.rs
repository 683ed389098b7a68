//! The errors: why an add was refused, with the value.

use std::error::Error;
use std::fmt;
use std::io;

use offlock_percpu::AllocError;
use offlock_percpu::lglock::LockError;

/// Why an entry was not added. The list is unchanged.
///
/// ```
/// use percpu_list::{PerCpuList, Refused};
///
/// fn admit(sessions: &PerCpuList<u32>, number: u32) -> Result<(), Refused> {
///     let _entry = sessions.insert(number)?; // an `InsertError` converts into its reason
///     Ok(())
/// }
///
/// let sessions = PerCpuList::new();
/// assert_eq!(admit(&sessions, 1), Ok(()));
/// sessions.close().unwrap();
/// assert_eq!(admit(&sessions, 2), Err(Refused::Closed));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// The list is closed. Maps to `ESHUTDOWN`.
    Closed,
    /// Memory is out. Maps to `ENOMEM`.
    Alloc(AllocError),
    /// The slot could not be locked, because this thread has a snapshot of the list (`EDEADLK`).
    Lock(LockError),
}

impl Refused {
    /// Returns the matching errno value.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Closed => libc::ESHUTDOWN,
            Self::Alloc(error) => error.errno(),
            Self::Lock(error) => error.errno(),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the list is closed"),
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
            Self::Closed => None,
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

/// The error of an add: the value, and why it was not added.
///
/// ```
/// use percpu_list::{PerCpuList, Refused};
///
/// let sessions = PerCpuList::new();
/// sessions.close()?;
/// let refused = sessions.insert("alice").unwrap_err();
/// assert_eq!((refused.value, refused.reason), ("alice", Refused::Closed));
/// # Ok::<(), percpu_list::LockError>(())
/// ```
pub struct InsertError<T> {
    /// The value that was not added.
    pub value: T,
    /// Why it was not added.
    pub reason: Refused,
}

impl<T> InsertError<T> {
    /// Returns the matching errno value.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.reason.errno()
    }
}

/// Prints only the reason, so the value need not be `Debug`.
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

/// Drops the value, and returns the reason.
impl<T> From<InsertError<T>> for Refused {
    fn from(error: InsertError<T>) -> Self {
        error.reason
    }
}
