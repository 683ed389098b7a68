//! An operation, which is a request that was not answered at once, and the reply of a request.

use std::io;

use aio_reap::AlignedBuf;
use nbd_protocol::{ALLOCATION_ID, Command, Extent, HeaderStyle, NbdError, ReplyHeader, Request};
use radix_ctx::CtxRef;

use crate::admission::Class;
use crate::contexts::Connection;

/// The reply of a request, or the buffer that it needs no more.
#[derive(Debug)]
pub(crate) struct Step {
    /// The reply's header. `None` while the request goes on.
    pub(crate) header: Option<ReplyHeader>,
    /// What follows the header.
    pub(crate) data: Option<AlignedBuf>,
    /// A buffer of the connection's account that is no longer needed.
    pub(crate) spent: Option<AlignedBuf>,
}

/// A request that was not answered at once.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) conn: CtxRef<Connection>,
    pub(crate) export: usize,
    pub(crate) file: usize,
    /// Where the export begins in the file: the offset of the request is one of the file.
    pub(crate) start: u64,
    pub(crate) style: HeaderStyle,
    pub(crate) request: Request,
    pub(crate) command: Command,
    /// So many bytes of a WRITE are in the cache.
    pub(crate) written: usize,
}

/// An operation that has ended, and its buffer.
pub(crate) struct Ended {
    pub(crate) operation: Operation,
    pub(crate) result: io::Result<()>,
    pub(crate) buf: Option<AlignedBuf>,
}

impl Operation {
    /// Whether the operation blocks a thread of the cache, perhaps for long.
    pub(crate) fn is_blocking(&self) -> bool {
        let Self { command, .. } = self;
        matches!(command, Command::Flush | Command::BlockStatus { .. })
            || matches!(command, Command::Trim { .. } | Command::WriteZeroes { .. })
    }

    /// The priority of the operation while it is queued.
    pub(crate) fn class(&self) -> Class {
        let len = self.request.len;
        match self.command {
            Command::Flush => Class::Sync,
            Command::BlockStatus { .. } => Class::SmallRead,
            Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. } => {
                Class::of_write(len)
            }
            Command::Read { .. } | Command::Cache | Command::Disconnect => Class::of_read(len),
        }
    }
}

impl Step {
    /// The end of a request, whose offset is one of the file, in which the export begins at
    /// `start`.
    pub(crate) fn reply(
        (request, command): (&Request, Command),
        start: u64,
        style: HeaderStyle,
        result: Result<(), NbdError>,
        buf: Option<AlignedBuf>,
    ) -> Self {
        let request = &Request { offset: request.offset - start, ..*request };
        match (command, result) {
            (Command::Read { .. }, Ok(())) => {
                let header = ReplyHeader::read_data(request, style);
                Self { header: Some(header), data: buf, spent: None }
            }
            (Command::BlockStatus { .. }, Ok(())) => {
                let count = buf.as_ref().map_or(0, |buf| buf.len() / Extent::size(style)) as u32;
                let header = ReplyHeader::block_status(request, style, ALLOCATION_ID, count);
                Self { header: Some(header), data: buf, spent: None }
            }
            (_, Ok(())) => {
                let header = ReplyHeader::done(request, style);
                Self { header: Some(header), data: None, spent: buf }
            }
            (_, Err(error)) => Self { spent: buf, ..Self::refuse(request, style, error) },
        }
    }

    pub(crate) fn refuse(request: &Request, style: HeaderStyle, error: NbdError) -> Self {
        let header = ReplyHeader::error(request, style, error);
        Self { header: Some(header), data: None, spent: None }
    }
}
