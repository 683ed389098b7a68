//! The one error type of the commands: a message, and the exit status that the program ends with.

use std::fmt;

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Error {
    message: String,
    status: i32,
}

impl Error {
    /// A failed check, which ends the program with status 1.
    pub(crate) fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), status: 1 }
    }

    /// A failure that has an exit status of its own, such as that of a child process.
    pub(crate) fn with_status(message: impl Into<String>, status: i32) -> Error {
        Error { message: message.into(), status }
    }

    /// An I/O error together with what was attempted, such as a path.
    pub(crate) fn io(what: impl fmt::Display, error: std::io::Error) -> Error {
        Error::new(format!("{what}: {error}"))
    }

    pub(crate) fn status(&self) -> i32 {
        self.status
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
