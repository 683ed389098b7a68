//! Errors that more than one module returns.

use std::error::Error;
use std::fmt;
use std::io;

/// Memory for a per-CPU structure could not be had. Maps to `ENOMEM`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocError {}

impl AllocError {
    pub(crate) fn new() -> Self {
        Self {}
    }

    /// The error as C knows it: `ENOMEM`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::ENOMEM
    }
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory for a per-CPU structure")
    }
}

impl Error for AllocError {}

impl From<AllocError> for io::Error {
    fn from(error: AllocError) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

/// The object is from before a `fork`, and a thread that does not exist here may hold it: waiting
/// could last for ever. Maps to `EOWNERDEAD`. See [`fork`](crate::fork).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Forked {}

impl Forked {
    pub(crate) fn new() -> Self {
        Self {}
    }

    /// The error as C knows it: `EOWNERDEAD`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::EOWNERDEAD
    }
}

impl fmt::Display for Forked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("inherited through fork and busy: its holder may not exist in this process")
    }
}

impl Error for Forked {}

impl From<Forked> for io::Error {
    fn from(error: Forked) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
