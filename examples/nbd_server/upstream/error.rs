//! Errors of a connection to an upstream server.

use std::io;

use nbd_protocol::ClientError;
use thiserror::Error;

/// Why a connection to the upstream could not be made, or was dropped.
#[derive(Debug, Error)]
pub(crate) enum UpstreamError {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("connection: {0}")]
    Socket(io::Error),
    #[error("the server closed the connection")]
    Closed,
    #[error("TLS: {0}")]
    Tls(String),
    #[error("protocol: {0}")]
    Protocol(#[from] ClientError),
    #[error("the export changed: {what} was {was}, and is {is}")]
    Changed { what: &'static str, was: u64, is: u64 },
    #[error("a reply to cookie {0:#x}, which no request in flight has")]
    UnknownCookie(u64),
    #[error("a reply to cookie {0:#x}, whose request was not sent to its end")]
    Early(u64),
    #[error("a chunk repeats offset {is} for a request at offset {was}")]
    OtherOffset { was: u64, is: u64 },
    #[error("a reply of another kind than the request of cookie {0:#x}")]
    OtherKind(u64),
    #[error("{len} bytes at offset {offset} are not within the {asked} bytes asked for at {start}")]
    OutOfRange { offset: u64, len: u64, start: u64, asked: u64 },
    #[error("a chunk repeats bytes at offset {0}")]
    Repeated(u64),
    #[error("a read of {asked} bytes ended after {got}")]
    Short { asked: u64, got: u64 },
    #[error("no reply for {0} seconds")]
    NoReply(u64),
    #[error("the server is shutting down")]
    Shutdown,
}

impl UpstreamError {
    /// Returns whether the server broke the protocol, as opposed to failing or closing the
    /// connection.
    pub(super) fn is_protocol_error(&self) -> bool {
        !matches!(
            self,
            Self::Connect(_)
                | Self::Socket(_)
                | Self::Closed
                | Self::Tls(_)
                | Self::NoReply(_)
                | Self::Shutdown
        )
    }
}
