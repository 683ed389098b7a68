//! The transmission phase of a connection as a parser: bytes in, requests out, no I/O.

use std::rc::Rc;

use aio_reap::AlignedBuf;
use nbd_protocol::{Agreed, Command, NbdError, Request};

use crate::export::Export;
use crate::extents;
use crate::memory::{Account, BufferPool, OutOfMemory};
use crate::operation::{Target, WorkerImage};

/// The shortest payload that is received in place. A guess: for less, another receive costs as much
/// as the copy.
const IN_PLACE: usize = 32 << 10;

/// The negotiated export, and the state of the request stream.
pub(crate) struct Session {
    /// The export with the size that the client was told; the image may have grown since.
    export: Export,
    pub(crate) target: Target,
    agreed: Agreed,
    stream: Stream,
    /// Bytes of the payload of the last request; 0 if it was refused.
    last_payload: usize,
}

#[derive(Debug)]
enum Stream {
    /// At the start of a header.
    Header,
    /// Inside the payload of a WRITE.
    Payload { request: Request, command: Command, buf: AlignedBuf, filled: usize },
    /// Inside the payload of a WRITE that was refused.
    Drain { request: Request, error: NbdError, left: u64 },
}

/// The next event in the request stream.
#[derive(Debug)]
pub(crate) enum Next {
    /// More bytes are needed.
    More,
    /// The request must wait for a buffer; its header was not consumed.
    NoMemory(OutOfMemory),
    /// A request to carry out, with the buffer that a READ or BLOCK_STATUS fills or the data of a
    /// WRITE.
    Start(Request, Command, Option<AlignedBuf>),
    /// A request to answer with an error.
    Refuse(Request, NbdError),
    /// The start of the next request is unknown, for the given reason.
    OutOfStep(String),
}

impl Session {
    /// Makes a session. `image` is the image of the export.
    pub(crate) fn new(export: Export, image: Rc<WorkerImage>, agreed: Agreed) -> Self {
        let unit = export.info.min_block.max(1).into();
        let target = Target { image, start: export.start, unit, style: agreed.style };
        Self { export, target, agreed, stream: Stream::Header, last_payload: 0 }
    }

    /// Consumes bytes from the front of `input` until they make a request.
    pub(crate) fn next(
        &mut self,
        input: &mut &[u8],
        memory: &mut BufferPool,
        account: &mut Account,
    ) -> Next {
        loop {
            match &mut self.stream {
                Stream::Header => {
                    let (request, used) = match Request::parse(input, self.agreed.style) {
                        Ok(Some(parsed)) => parsed,
                        Ok(None) => return Next::More,
                        Err(error) => return Next::OutOfStep(error.to_string()),
                    };
                    let info = &self.export.info;
                    let payload = request.checked_payload_len(self.agreed.style, info.max_block);
                    let payload = match payload {
                        Ok(payload) => payload,
                        Err(error) => return Next::OutOfStep(error.to_string()),
                    };
                    let mut checked = request.check(info, self.agreed);
                    let mut buf = None;
                    let room = match checked {
                        Ok(command @ (Command::Read { .. } | Command::Write { .. })) => {
                            let room = self.export.room(&request, command);
                            // Too long once it is widened to whole units of the image.
                            checked = room.map(|_| command).ok_or(NbdError::Inval);
                            room
                        }
                        Ok(Command::BlockStatus { .. }) => Some(extents::ROOM),
                        _ => None,
                    };
                    if let Some(room) = room {
                        match memory.acquire(room, account) {
                            Ok(taken) => buf = Some(taken),
                            Err(OutOfMemory::System) => checked = Err(NbdError::NoMem),
                            Err(short) => return Next::NoMemory(short),
                        }
                    }
                    *input = &input[used..];
                    self.last_payload = 0;
                    match (checked, buf) {
                        (Ok(command @ Command::Write { .. }), Some(buf)) => {
                            self.last_payload = buf.len();
                            self.stream = Stream::Payload { request, command, buf, filled: 0 };
                        }
                        (Ok(command), buf) => return Next::Start(request, command, buf),
                        (Err(error), _) => {
                            self.stream = Stream::Drain { request, error, left: payload };
                        }
                    }
                }
                Stream::Payload { buf, filled, .. } => {
                    let count = input.len().min(buf.len() - *filled);
                    buf[*filled..*filled + count].copy_from_slice(&input[..count]);
                    *filled += count;
                    *input = &input[count..];
                    if *filled < buf.len() {
                        return Next::More;
                    }
                    let whole = std::mem::replace(&mut self.stream, Stream::Header);
                    if let Stream::Payload { request, command, buf, .. } = whole {
                        return Next::Start(request, command, Some(buf));
                    }
                }
                Stream::Drain { request, error, left } => {
                    let count =
                        usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
                    *left -= count as u64;
                    *input = &input[count..];
                    if *left > 0 {
                        return Next::More;
                    }
                    let refused = Next::Refuse(*request, *error);
                    self.stream = Stream::Header;
                    return refused;
                }
            }
        }
    }

    /// Returns whether the last request is a WRITE whose payload is better received in place than
    /// copied. Most often another long WRITE follows such a one.
    pub(crate) fn writes_long(&self) -> bool {
        self.last_payload >= IN_PLACE
    }

    /// Returns whether a part of a WRITE's payload is missing.
    pub(crate) fn is_inside_payload(&self) -> bool {
        matches!(self.stream, Stream::Payload { .. })
    }

    /// Returns the space for the missing part of a WRITE's payload, to receive it in place.
    pub(crate) fn payload_space(&mut self) -> Option<&mut [u8]> {
        match &mut self.stream {
            Stream::Payload { buf, filled, .. } => Some(&mut buf[*filled..]),
            _ => None,
        }
    }

    /// Records that `count` bytes were received into [`payload_space`](Self::payload_space).
    pub(crate) fn payload_received(&mut self, count: usize) {
        if let Stream::Payload { filled, .. } = &mut self.stream {
            *filled += count;
        }
    }

    /// Returns the buffer of an incomplete WRITE. The payload will not arrive any more.
    pub(crate) fn abandon(self) -> Option<AlignedBuf> {
        match self.stream {
            Stream::Payload { buf, .. } => Some(buf),
            _ => None,
        }
    }
}
