//! The eight errors of the protocol.

use std::{fmt, io};

/// An error a request can end with. The numbers are those on the wire, the same as Linux errnos.
///
/// # Examples
///
/// ```
/// use nbd_protocol::NbdError;
///
/// let full = std::io::Error::from_raw_os_error(28);
/// assert_eq!(NbdError::from(&full), NbdError::NoSpc);
/// assert_eq!(NbdError::from_code(28), Some(NbdError::NoSpc));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum NbdError {
    /// Not permitted: a write to a read-only export.
    Perm = 1,
    /// The device failed.
    Io = 5,
    /// Out of memory.
    NoMem = 12,
    /// The request is malformed, out of range or not supported.
    Inval = 22,
    /// No space, or a write past the end.
    NoSpc = 28,
    /// A READ with DF that is too long for one chunk.
    Overflow = 75,
    /// A WRITE_ZEROES with FAST_ZERO that would not be fast.
    NotSup = 95,
    /// The server is going away.
    Shutdown = 108,
}

impl NbdError {
    /// The number on the wire.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The error with number `code` in a reply, `None` if 0. As the protocol asks of clients, a
    /// number it does not define counts as [`Inval`](Self::Inval).
    #[must_use]
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => return None,
            1 => Self::Perm,
            5 => Self::Io,
            12 => Self::NoMem,
            28 => Self::NoSpc,
            75 => Self::Overflow,
            95 => Self::NotSup,
            108 => Self::Shutdown,
            _ => Self::Inval,
        })
    }

    /// The error to report when a system call on the image fails with the Linux errno `errno`.
    ///
    /// Never `Overflow` or `NotSup`: the protocol keeps them for READ with DF and WRITE_ZEROES
    /// with FAST_ZERO, and the code that serves those names them. An errno without a counterpart is
    /// `Io`.
    #[must_use]
    pub const fn from_errno(errno: i32) -> Self {
        match errno {
            1 | 13 | 30 => Self::Perm,    // EPERM, EACCES, EROFS
            12 => Self::NoMem,            // ENOMEM
            22 | 75 | 95 => Self::Inval,  // EINVAL, EOVERFLOW, EOPNOTSUPP
            27 | 28 | 122 => Self::NoSpc, // EFBIG, ENOSPC, EDQUOT
            108 => Self::Shutdown,        // ESHUTDOWN
            _ => Self::Io,
        }
    }
}

/// [`NbdError::from_errno`].
impl From<i32> for NbdError {
    fn from(errno: i32) -> Self {
        Self::from_errno(errno)
    }
}

impl From<&io::Error> for NbdError {
    fn from(error: &io::Error) -> Self {
        error.raw_os_error().map_or(Self::Io, Self::from_errno)
    }
}

impl fmt::Display for NbdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Perm => "operation not permitted",
            Self::Io => "input/output error",
            Self::NoMem => "cannot allocate memory",
            Self::Inval => "invalid argument",
            Self::NoSpc => "no space left on device",
            Self::Overflow => "value too large",
            Self::NotSup => "operation not supported",
            Self::Shutdown => "server is shutting down",
        })
    }
}

impl std::error::Error for NbdError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_survive_the_wire() {
        for code in [1, 5, 12, 22, 28, 75, 95, 108] {
            assert_eq!(NbdError::from_code(code).map(NbdError::code), Some(code));
        }
        assert_eq!(NbdError::from_code(0), None);
        assert_eq!(NbdError::from_code(4711), Some(NbdError::Inval));
    }

    #[test]
    fn errnos_map_as_the_protocol_says() {
        assert_eq!(NbdError::from(122), NbdError::NoSpc);
        assert_eq!(NbdError::from(27), NbdError::NoSpc);
        assert_eq!(NbdError::from(30), NbdError::Perm);
        assert_eq!(NbdError::from(6), NbdError::Io);
        assert_eq!(NbdError::from(95), NbdError::Inval);
        assert_eq!(NbdError::from(&io::Error::other("short read")), NbdError::Io);
        assert_eq!(NbdError::from(&io::Error::from_raw_os_error(28)), NbdError::NoSpc);
    }
}
