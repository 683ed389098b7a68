//! A request on its way: what it asks of the engine, what follows, and its reply.

use std::io;

use aio_reap::AlignedBuf;
use nbd_protocol::{ALLOCATION_ID, Extent, HeaderStyle, NbdError, ReplyHeader, Request};
use radix_ctx::CtxRef;

use crate::admission::Class;
use crate::changes::Work;
use crate::contexts::Connection;
use crate::memory::MOST_ZEROS;

/// How far a request got: replied to, or on its way.
#[derive(Debug)]
pub(crate) struct Step {
    /// The reply's header; `None` while the request goes on.
    pub(crate) header: Option<ReplyHeader>,
    /// What follows the header.
    pub(crate) data: Option<AlignedBuf>,
    /// A buffer of the connection's account that is no longer needed.
    pub(crate) spent: Option<AlignedBuf>,
}

/// An operation in the engine or in a hand, or on its way there, and the request that it is for.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) conn: CtxRef<Connection>,
    pub(crate) export: usize,
    pub(crate) file: usize,
    /// Where the export begins in the file: the offset of the request is one of the file.
    pub(crate) start: u64,
    pub(crate) style: HeaderStyle,
    /// Another operation of the request was carried out.
    pub(crate) begun: bool,
    pub(crate) request: Request,
    pub(crate) stage: Stage,
    /// The number of its sync, while it is one.
    pub(crate) sync: u64,
    /// What a hand does instead of the engine.
    pub(crate) work: Option<Work>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Read,
    Write {
        fua: bool,
    },
    Sync,
    Punch {
        fua: bool,
        zeroes: Option<Zeroes>,
    },
    ZeroRange {
        fua: bool,
        zeroes: Zeroes,
    },
    /// Writing zeros; this many bytes are done.
    Zeros {
        fua: bool,
        done: u64,
    },
    Advise,
    Map,
}

/// How much a WRITE_ZEROES leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Zeroes {
    pub(crate) fast: bool,
}

/// What follows a completed operation.
pub(crate) enum Then {
    Next(Stage),
    Reply(Result<(), NbdError>),
}

impl Operation {
    /// What it is to others that wait.
    pub(crate) fn class(&self) -> Class {
        let len = self.request.len;
        match self.stage {
            Stage::Sync => Class::Sync,
            Stage::Map => Class::SmallRead,
            Stage::Read | Stage::Advise => Class::of_read(len),
            Stage::Zeros { done, .. } => Class::of_write(len - done),
            Stage::Write { .. } | Stage::Punch { .. } | Stage::ZeroRange { .. } => {
                Class::of_write(len)
            }
        }
    }

    pub(crate) fn then(&self, result: &io::Result<usize>) -> Then {
        let unsupported = matches!(
            result.as_ref().err().and_then(io::Error::raw_os_error),
            Some(libc::EOPNOTSUPP | libc::ENODEV | libc::ENOSYS)
        );
        let len = self.request.len;
        let synced = |fua| if fua { Then::Next(Stage::Sync) } else { Then::Reply(Ok(())) };
        match (self.stage, result) {
            // The image is shorter than when it was opened.
            (Stage::Read, Ok(count)) if (*count as u64) < len => Then::Reply(Err(NbdError::Io)),
            // Advice that could not be taken has not failed.
            (Stage::Advise, _) => Then::Reply(Ok(())),
            (Stage::Punch { fua, zeroes: None }, Err(_)) if unsupported => synced(fua),
            (Stage::Punch { fua, zeroes: Some(zeroes) }, Err(_)) if unsupported => {
                Then::Next(Stage::ZeroRange { fua, zeroes })
            }
            (Stage::ZeroRange { fua, zeroes }, Err(_)) if unsupported => {
                if zeroes.fast {
                    Then::Reply(Err(NbdError::NotSup))
                } else if len > MOST_ZEROS {
                    Then::Reply(Err(NbdError::Inval))
                } else {
                    Then::Next(Stage::Zeros { fua, done: 0 })
                }
            }
            (Stage::Zeros { fua, done }, Ok(count)) if done + (*count as u64) < len => {
                Then::Next(Stage::Zeros { fua, done: done + *count as u64 })
            }
            (
                Stage::Write { fua }
                | Stage::Punch { fua, .. }
                | Stage::ZeroRange { fua, .. }
                | Stage::Zeros { fua, .. },
                Ok(_),
            ) => synced(fua),
            (Stage::Read | Stage::Sync | Stage::Map, Ok(_)) => Then::Reply(Ok(())),
            (_, Err(error)) => Then::Reply(Err(NbdError::from(error))),
        }
    }

    pub(crate) fn reply(&self, result: Result<(), NbdError>, buf: Option<AlignedBuf>) -> Step {
        Step::reply(&self.request, self.start, self.style, self.stage, result, buf)
    }
}

impl Step {
    /// A request's end, at that stage. The request's offset is one of the file, in which the export begins at
    /// `start`.
    pub(crate) fn reply(
        request: &Request,
        start: u64,
        style: HeaderStyle,
        stage: Stage,
        result: Result<(), NbdError>,
        buf: Option<AlignedBuf>,
    ) -> Self {
        let request = &Request { offset: request.offset - start, ..*request };
        match (stage, result) {
            (Stage::Read, Ok(())) => {
                let header = ReplyHeader::read_data(request, style);
                Self { header: Some(header), data: buf, spent: None }
            }
            (Stage::Map, Ok(())) => {
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
