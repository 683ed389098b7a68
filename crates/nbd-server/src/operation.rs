//! Operations, which are requests that were not answered at once; their targets; and replies.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use aio_reap::{AlignedBuf, File};
use nbd_protocol::{ALLOCATION_ID, Command, Extent, HeaderStyle, NbdError, ReplyHeader, Request};
use offlock_percpu::AllocError;
use radix_ctx::CtxRef;

use crate::admission::{Class, Queue};
use crate::blocks::{Image, Source};
use crate::contexts::Connection;

/// The reply of a request, and a buffer that the request no longer needs.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) header: ReplyHeader,
    /// The payload behind the header.
    pub(crate) data: Option<AlignedBuf>,
    /// A buffer to release to the connection's account.
    pub(crate) spent: Option<AlignedBuf>,
}

/// A queued operation, and its buffer.
pub(crate) type Waiting = (Operation, Option<AlignedBuf>);

/// An image within one worker. Shared by the worker's connections that have it open, and by their
/// operations.
pub(crate) struct WorkerImage {
    /// Attached to the worker's engine. A field before `image`, so that it is dropped before the
    /// last reference to the image.
    pub(crate) source: Source<File>,
    pub(crate) image: Arc<Image>,
    pub(crate) queue: Rc<Queue<Waiting>>,
    /// The queue of blocking operations.
    pub(crate) blocking: Rc<Queue<Waiting>>,
}

impl WorkerImage {
    pub(crate) fn new(image: Arc<Image>, source: Source<File>) -> Result<Rc<Self>, AllocError> {
        Ok(Rc::new(Self { source, image, queue: Queue::new()?, blocking: Queue::new()? }))
    }
}

/// The image and the export of a connection's requests.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) image: Rc<WorkerImage>,
    /// The offset of the export in the image.
    pub(crate) start: u64,
    /// The granularity of the export's extents, in bytes.
    pub(crate) unit: u64,
    /// The style of reply headers.
    pub(crate) style: HeaderStyle,
}

/// A request that was not answered at once.
pub(crate) struct Operation {
    pub(crate) conn: CtxRef<Connection>,
    pub(crate) target: Target,
    /// With the offset in the image, not in the export.
    pub(crate) request: Request,
    pub(crate) command: Command,
    /// Bytes of a WRITE that are in the cache already.
    pub(crate) written: usize,
}

/// An operation that has ended, and its buffer.
pub(crate) struct Ended {
    pub(crate) operation: Operation,
    pub(crate) result: io::Result<()>,
    pub(crate) buf: Option<AlignedBuf>,
}

impl Operation {
    /// Returns whether the operation may block a thread of the cache for long.
    pub(crate) fn is_blocking(&self) -> bool {
        let Self { command, .. } = self;
        matches!(command, Command::Flush | Command::BlockStatus { .. })
            || matches!(command, Command::Trim { .. } | Command::WriteZeroes { .. })
    }

    /// Returns the priority of the operation in a queue.
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
    /// Makes the reply of a request, whose offset is relative to the image.
    pub(crate) fn reply(
        (request, command): (&Request, Command),
        target: &Target,
        result: Result<(), NbdError>,
        buf: Option<AlignedBuf>,
    ) -> Self {
        let style = target.style;
        let request = &Request { offset: request.offset - target.start, ..*request };
        match (command, result) {
            (Command::Read { .. }, Ok(())) => {
                let header = ReplyHeader::read_data(request, style);
                let data = buf.map(|mut buf| {
                    buf.set_len(request.len as usize); // as the header says
                    buf
                });
                Self { header, data, spent: None }
            }
            (Command::BlockStatus { .. }, Ok(())) => {
                let count = buf.as_ref().map_or(0, |buf| buf.len() / Extent::size(style)) as u32;
                let header = ReplyHeader::block_status(request, style, ALLOCATION_ID, count);
                Self { header, data: buf, spent: None }
            }
            (_, Ok(())) => {
                let header = ReplyHeader::done(request, style);
                Self { header, data: None, spent: buf }
            }
            (_, Err(error)) => Self { spent: buf, ..Self::refuse(request, style, error) },
        }
    }

    pub(crate) fn refuse(request: &Request, style: HeaderStyle, error: NbdError) -> Self {
        let header = ReplyHeader::error(request, style, error);
        Self { header, data: None, spent: None }
    }
}
