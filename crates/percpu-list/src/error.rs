//! The errors: why an add was refused, with the value.

use std::error::Error;
use std::fmt;
use std::io;

use offlock_sync::impl_error;

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
    NoMemory,
    /// This thread has a snapshot of the list. Maps to `EDEADLK`.
    Deadlock,
}

impl_error! {
    Refused {
        Self::Closed => ESHUTDOWN, "the list is closed";
        Self::NoMemory => ENOMEM, "out of memory";
        Self::Deadlock => EDEADLK, "this thread has a snapshot of the list";
    }
}

/// The call would wait for the snapshot of its own thread. It has changed nothing, unless it was
/// [`Entry::remove`](crate::Entry::remove), which ends the entry. Maps to `EDEADLK`.
///
/// ```
/// use percpu_list::{Deadlock, PerCpuList};
///
/// let sessions = PerCpuList::<u32>::new();
/// let snapshot = sessions.lock_all().unwrap();
/// assert_eq!(sessions.close(), Err(Deadlock));
/// drop(snapshot);
/// assert_eq!(sessions.close(), Ok(()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlock;

impl_error! { Deadlock { Self => EDEADLK, "this thread has a snapshot of the list"; } }

impl From<Deadlock> for Refused {
    fn from(_: Deadlock) -> Self {
        Self::Deadlock
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
/// # Ok::<(), percpu_list::Deadlock>(())
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

impl<T> Error for InsertError<T> {}

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
