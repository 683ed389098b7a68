//! An operation, which is a request that was not answered at once, where it goes, and the reply of a request.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use aio_reap::{AlignedBuf, File};
use nbd_protocol::{ALLOCATION_ID, Command, Extent, HeaderStyle, NbdError, ReplyHeader, Request};
use percpu::AllocError;
use radix_ctx::CtxRef;

use crate::admission::{Class, Queue};
use crate::blocks::{Image, Source};
use crate::contexts::Connection;

/// The reply of a request, and the buffer that it needs no more.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) header: ReplyHeader,
    /// What follows the header.
    pub(crate) data: Option<AlignedBuf>,
    /// A buffer of the connection's account that is no longer needed.
    pub(crate) spent: Option<AlignedBuf>,
}

/// A queued operation, and its buffer.
pub(crate) type Waiting = (Operation, Option<AlignedBuf>);

/// An image as one worker uses it: by all its connections that have it open, and by their operations.
pub(crate) struct WorkerImage {
    /// Attached to the worker's engine. Dropped before the reference to the image, which may be the last.
    pub(crate) source: Source<File>,
    pub(crate) image: Arc<Image>,
    pub(crate) queue: Rc<Queue<Waiting>>,
    /// Of blocking operations.
    pub(crate) blocking: Rc<Queue<Waiting>>,
}

impl WorkerImage {
    pub(crate) fn new(image: Arc<Image>, source: Source<File>) -> Result<Rc<Self>, AllocError> {
        Ok(Rc::new(Self { source, image, queue: Queue::new()?, blocking: Queue::new()? }))
    }
}

/// Where the requests of a connection go.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) image: Rc<WorkerImage>,
    /// Where the export begins in the image.
    pub(crate) start: u64,
    /// Extents of the export begin and end at multiples of so many bytes.
    pub(crate) unit: u64,
    /// Of replies.
    pub(crate) style: HeaderStyle,
}

/// A request that was not answered at once.
pub(crate) struct Operation {
    pub(crate) conn: CtxRef<Connection>,
    pub(crate) target: Target,
    /// Its offset is one of the image.
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
    /// The end of a request, whose offset is one of the image.
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
                Self { header, data: buf, spent: None }
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
