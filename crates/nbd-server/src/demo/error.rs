//! The errors of the demo.

use std::io;
use std::path::PathBuf;

use nbd_protocol::{ClientError, NbdError};

/// Why the demo failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum DemoError {
    /// No server at the socket.
    #[error("cannot connect to {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke, or the server was silent for 30 seconds.
    #[error("connection lost: {0}")]
    Lost(#[from] io::Error),
    /// The server broke the protocol or refused the export.
    #[error(transparent)]
    Protocol(#[from] ClientError),
    /// The image cannot be used.
    #[error("image of {size} bytes: the demo needs a writable one of {needed} bytes or more")]
    Unusable {
        /// Its size in bytes.
        size: u64,
        /// The smallest that would do, in bytes.
        needed: u64,
    },
    /// A request failed.
    #[error("{kind} of {len} bytes at {offset} failed: {error}")]
    Failed {
        /// The kind of request.
        kind: &'static str,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The server's error.
        error: NbdError,
    },
    /// A reply that matches no request, or has wrong contents for its request.
    #[error("reply does not fit its request: {0}")]
    Stray(String),
    /// A byte differs from what was written.
    #[error("wrong data at byte {offset}: {found:#04x} instead of {expected:#04x}")]
    WrongData {
        /// Offset in bytes.
        offset: u64,
        /// The byte read.
        found: u8,
        /// The byte last written.
        expected: u8,
    },
    /// Another connection failed first; that error is the one reported.
    #[error("stopped because another connection failed")]
    Stopped,
}
