//! A connection of the built-in client: one thread that keeps many requests in flight.
//!
//! ```text
//!  plan -> begin -> [unsent bytes] --send--> server --receive--> [input] -> reply -> verify -> end
//! ```
//!
//! A server that has too many unread replies stops reading. So the client waits for replies and for room in the socket at
//! the same time, and neither side waits for the other for ever.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nbd_protocol::wire::cmd;
use nbd_protocol::{
    ClientHandshake, ClientStep, CommandFlags, Connected, HeaderStyle, Reply, ReplyContent,
    Request, RequestHeader, TransmissionFlags,
};
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendFlags, send};
use slab::Slab;

use super::model::{DemoError, Kind, Next, Op, Plan, Region, put_pattern};
use super::report::Phase;

/// How long the server may be silent before the client gives up.
const SILENCE: Duration = Duration::from_secs(30);
/// Most payload, in bytes, of the requests in flight on a connection.
const MAX_IN_FLIGHT: usize = 8 << 20;
/// Least room for one receive: many small replies in one system call.
const RECEIVED: usize = 256 << 10;

/// A request that was queued or sent.
#[derive(Debug)]
struct InFlight {
    op: Op,
    cookie: u64,
    start: Instant,
    /// Bytes of a read's data that were received and compared.
    received: usize,
}

/// One negotiated connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: UnixStream,
    export: Connected,
    /// Most requests in flight.
    pub(super) depth: usize,
}

impl Connection {
    /// Connects to the default export; connections with an even number ask for structured replies.
    pub(crate) fn open(socket: &Path, depth: usize, number: usize) -> Result<Self, DemoError> {
        let connect = |source| DemoError::Connect { path: socket.to_owned(), source };
        let mut stream = UnixStream::connect(socket).map_err(connect)?;
        stream.set_read_timeout(Some(SILENCE))?;
        let style =
            if number.is_multiple_of(2) { HeaderStyle::Structured } else { HeaderStyle::Simple };
        let mut handshake = ClientHandshake::new("", style);
        let (mut input, mut output) = (Vec::new(), Vec::new());
        let export = loop {
            let (used, step) = handshake.receive(&input, &mut output)?;
            input.drain(..used);
            match step {
                ClientStep::Connected(export) => break export,
                ClientStep::More => {}
                ClientStep::StartTls | ClientStep::Listed(_) => {
                    unreachable!("neither was asked for")
                }
            }
            stream.write_all(&output)?;
            output.clear();
            receive(&stream, &mut input)?;
        };
        if !input.is_empty() {
            return Err(DemoError::Stray("bytes before the first request".into()));
        }
        Ok(Self { stream, export, depth: depth.max(1) })
    }

    /// Returns the server's description of the export.
    pub(crate) fn export(&self) -> &Connected {
        &self.export
    }

    /// Sends a disconnect request, and closes this direction: nbdkit 1.48 closes no sooner. The server closes without
    /// a reply.
    pub(crate) fn close(mut self) -> Result<(), DemoError> {
        let (flags, command) = (CommandFlags::NONE, cmd::DISC);
        let request = Request { flags, command, cookie: 0, offset: 0, len: 0 };
        self.stream.write_all(encode(&request, self.export.style)?.as_slice())?;
        self.stream.shutdown(Shutdown::Write)?;
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest)?;
        if rest.is_empty() { Ok(()) } else { Err(DemoError::Stray("bytes after DISC".into())) }
    }

    /// Carries out `plan` on `region`, until the plan ends and every reply has arrived.
    pub(super) fn run(&mut self, region: &mut Region, plan: impl Plan) -> Result<Phase, DemoError> {
        Run {
            connection: self,
            region,
            in_flight: Slab::new(),
            bytes: 0,
            unsent: Vec::new(),
            sent: 0,
            input: Vec::new(),
            sequence: 0,
            phase: Phase::default(),
        }
        .run(plan)
    }
}

/// One phase on one connection.
struct Run<'a> {
    connection: &'a Connection,
    region: &'a mut Region,
    /// The low half of a cookie is a key here.
    in_flight: Slab<InFlight>,
    /// Payload of the requests in flight, in bytes.
    bytes: usize,
    /// The requests that were not sent in full; `sent` bytes of them were.
    unsent: Vec<u8>,
    sent: usize,
    /// Received bytes that make no whole reply yet.
    input: Vec<u8>,
    /// Makes every cookie of a connection's phase different, the high half.
    sequence: u64,
    phase: Phase,
}

impl Run<'_> {
    fn run(mut self, mut plan: impl Plan) -> Result<Phase, DemoError> {
        let mut ended = false;
        loop {
            while !ended
                && self.in_flight.len() < self.connection.depth
                && self.bytes < MAX_IN_FLIGHT
            {
                match plan.next(self.region, self.connection.export.flags) {
                    Next::Send(op) => self.begin(op)?,
                    Next::Wait => break,
                    Next::End => ended = true,
                }
            }
            if self.in_flight.is_empty() && ended {
                return Ok(self.phase);
            }
            if !self.in_flight.is_empty() && self.send()? {
                self.receive()?;
            }
        }
    }

    /// Appends a request, and the data of a write, to the unsent bytes.
    fn begin(&mut self, mut op: Op) -> io::Result<()> {
        self.region.begin(&mut op);
        let entry = self.in_flight.vacant_entry();
        self.sequence += 1;
        let cookie = (self.sequence << 32) | entry.key() as u64;
        let Connected { style, flags: offered, .. } = self.connection.export;
        let request = Request {
            flags: flags(&op, offered),
            command: command(op.kind),
            cookie,
            offset: op.offset(),
            len: op.len().into(),
        };
        self.unsent.extend_from_slice(encode(&request, style)?.as_slice());
        if op.kind.is_write() {
            put_pattern(&mut self.unsent, op.blocks.clone(), op.version);
        }
        self.bytes += payload(&op);
        entry.insert(InFlight { op, cookie, start: Instant::now(), received: 0 });
        Ok(())
    }

    /// Sends as much as the socket takes. If that is not all, waits for room or a reply. Returns whether to receive.
    fn send(&mut self) -> io::Result<bool> {
        let stream = &self.connection.stream;
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        while self.sent < self.unsent.len() {
            match retry_on_intr(|| send(stream, &self.unsent[self.sent..], flags)) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => {
                    let mut polled = [PollFd::new(stream, PollFlags::IN | PollFlags::OUT)];
                    let silence = Timespec::try_from(SILENCE).unwrap_or_default(); // it fits
                    if retry_on_intr(|| poll(&mut polled, Some(&silence)))? == 0 {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    return Ok(!polled[0].revents().difference(PollFlags::OUT).is_empty());
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.unsent.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Waits for input, and handles all whole replies.
    fn receive(&mut self) -> Result<(), DemoError> {
        receive(&self.connection.stream, &mut self.input)?;
        let input = std::mem::take(&mut self.input);
        let mut rest = &input[..];
        while let Some((reply, used)) = Reply::parse(rest, self.connection.export.style)? {
            let Some((data, after)) = rest[used..].split_at_checked(self.data_len(&reply)) else {
                break;
            };
            self.reply(&reply, data)?;
            rest = after;
        }
        let used = input.len() - rest.len();
        self.input = input;
        self.input.drain(..used);
        Ok(())
    }

    /// Returns the request that a reply names.
    fn request_of(&self, reply: &Reply) -> Option<&InFlight> {
        let found = self.in_flight.get(reply.cookie as u32 as usize);
        found.filter(|request| request.cookie == reply.cookie)
    }

    /// Returns the bytes of data that follow `reply`.
    fn data_len(&self, reply: &Reply) -> usize {
        match reply.content {
            ReplyContent::Data { len, .. } => len as usize,
            ReplyContent::Simple(Ok(())) => {
                let read = self.request_of(reply).filter(|request| request.op.kind.is_read());
                read.map_or(0, |request| request.op.len() as usize)
            }
            _ => 0,
        }
    }

    /// Handles a reply and its data.
    fn reply(&mut self, reply: &Reply, data: &[u8]) -> Result<(), DemoError> {
        let stray = || DemoError::Stray(format!("{reply:?}"));
        let InFlight { op, .. } = self.request_of(reply).ok_or_else(stray)?;
        let (is_read, chunks) = (op.kind.is_read(), self.connection.export.style.has_chunks());
        let zeros;
        let (offset, data) = match reply.content {
            ReplyContent::Simple(Err(error)) | ReplyContent::Error(error) => {
                let (kind, offset, len) = (op.kind.name(), op.offset(), op.len().into());
                return Err(DemoError::Failed { kind, offset, len, error });
            }
            // After structured replies were negotiated, only they may answer a read.
            ReplyContent::Simple(Ok(())) if !(is_read && chunks) => (op.offset(), data),
            ReplyContent::Data { offset, .. } if is_read && chunks => (offset, data),
            ReplyContent::Hole { offset, len } if is_read && chunks && len <= op.len() => {
                zeros = vec![0; len as usize];
                (offset, &zeros[..])
            }
            ReplyContent::None if chunks => (op.offset(), data),
            _ => return Err(stray()),
        };
        if is_read && !data.is_empty() {
            let part = op.part(offset, data.len()).ok_or_else(stray)?;
            self.region.verify(part, data)?;
        }
        let key = reply.cookie as u32 as usize;
        self.in_flight[key].received += data.len();
        if reply.done { self.finish(key) } else { Ok(()) }
    }

    /// Counts a request whose last reply has arrived.
    fn finish(&mut self, key: usize) -> Result<(), DemoError> {
        let InFlight { op, start, received, .. } = self.in_flight.remove(key);
        let len = op.len();
        if op.kind.is_read() && received != len as usize {
            let what = format!("{received} bytes of {len} read at {}", op.offset());
            return Err(DemoError::Stray(what));
        }
        self.region.end(&op);
        self.phase.count(op.kind, start.elapsed(), len);
        self.bytes -= payload(&op);
        Ok(())
    }
}

/// Waits for input and appends it. The end of the stream is an error.
fn receive(stream: &UnixStream, input: &mut Vec<u8>) -> io::Result<()> {
    input.reserve(RECEIVED);
    match retry_on_intr(|| rustix::io::read(stream, spare_capacity(input)))? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

fn flags(op: &Op, offered: TransmissionFlags) -> CommandFlags {
    match op.kind {
        Kind::WriteFua => CommandFlags::FUA,
        Kind::Read | Kind::LargeRead
            if op.flagged && offered.contains(TransmissionFlags::SEND_DF) =>
        {
            CommandFlags::DF
        }
        Kind::WriteZeroes if op.flagged => CommandFlags::NO_HOLE,
        _ => CommandFlags::NONE,
    }
}

fn encode(request: &Request, style: HeaderStyle) -> io::Result<RequestHeader> {
    request.encode(style).map_err(io::Error::other)
}

/// Returns the bytes of data that a request transfers.
fn payload(op: &Op) -> usize {
    if op.kind.is_read() || op.kind.is_write() { op.len() as usize } else { 0 }
}

fn command(kind: Kind) -> u16 {
    match kind {
        Kind::Read | Kind::LargeRead => cmd::READ,
        Kind::Write | Kind::WriteFua | Kind::LargeWrite => cmd::WRITE,
        Kind::Trim => cmd::TRIM,
        Kind::WriteZeroes => cmd::WRITE_ZEROES,
        Kind::Flush => cmd::FLUSH,
    }
}
