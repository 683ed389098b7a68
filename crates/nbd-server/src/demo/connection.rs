//! A connection of the built-in client: one thread that keeps many requests in flight.
//!
//! ```text
//!  plan -> begin -> [unsent bytes] --write--> server --read--> reply -> verify -> end
//! ```
//!
//! The socket blocks, but a write gives up after a millisecond. A server that has too many unread
//! replies stops reading. Then the client reads, and writes again later. So neither side waits for
//! the other for ever.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nbd_protocol::wire::cmd;
use nbd_protocol::{
    ClientError, ClientHandshake, ClientStep, CommandFlags, Connected, HeaderStyle, Reply,
    ReplyContent, Request, RequestHeader, TransmissionFlags,
};

use super::model::{DemoError, Kind, Next, Op, Plan, Region, put_pattern};
use super::report::Tally;

/// How long the server may be silent before the client gives up.
const SILENCE: Duration = Duration::from_secs(30);
/// How long to wait for the socket to take bytes before reading replies.
const WRITE_PATIENCE: Duration = Duration::from_millis(1);
/// Most payload, in bytes, of the requests in flight on a connection.
const MAX_IN_FLIGHT: usize = 8 << 20;
/// Size of the read buffer: many small replies in one system call.
const READ_BUFFER: usize = 256 << 10;
/// Longest reply header that a client must parse: an error chunk with its message.
const LONGEST_HEADER: usize = 8 << 10;

/// The progress of a phase, and whether it must stop.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) bytes: AtomicU64,
    pub(super) ops: AtomicU64,
    pub(super) stop: AtomicBool,
}

/// A request that was queued or sent.
#[derive(Debug)]
struct InFlight {
    op: Op,
    cookie: u64,
    start: Instant,
    /// Bytes of a read's data received so far, and the data.
    received: usize,
    data: Vec<u8>,
    failed: Option<nbd_protocol::NbdError>,
}

/// One negotiated connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: BufReader<UnixStream>,
    export: Connected,
    /// Most requests in flight.
    pub(super) depth: usize,
}

impl Connection {
    /// Connects to the default export; connections with an even number ask for structured replies.
    pub(super) fn open(socket: &Path, depth: usize, number: usize) -> Result<Self, DemoError> {
        let connect = |source| DemoError::Connect { path: socket.to_owned(), source };
        let mut stream = UnixStream::connect(socket).map_err(connect)?;
        stream.set_read_timeout(Some(SILENCE))?;
        let style =
            if number.is_multiple_of(2) { HeaderStyle::Structured } else { HeaderStyle::Simple };
        let mut handshake = ClientHandshake::new("", style);
        let (mut input, mut output, mut piece) = (Vec::new(), Vec::new(), [0; 4096]);
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
            let len = uninterrupted(|| stream.read(&mut piece))?;
            if len == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            input.extend_from_slice(&piece[..len]);
        };
        if !input.is_empty() {
            return Err(DemoError::Stray("bytes before the first request".into()));
        }
        stream.set_write_timeout(Some(WRITE_PATIENCE))?;
        let stream = BufReader::with_capacity(READ_BUFFER, stream);
        Ok(Self { stream, export, depth: depth.max(1) })
    }

    /// Returns the server's description of the export.
    pub(super) fn export(&self) -> &Connected {
        &self.export
    }

    /// Sends a disconnect request. The server closes without a reply.
    pub(super) fn close(mut self) -> Result<(), DemoError> {
        let (flags, command) = (CommandFlags::NONE, cmd::DISC);
        let request = Request { flags, command, cookie: 0, offset: 0, len: 0 };
        self.stream.get_mut().write_all(encode(&request, self.export.style)?.as_slice())?;
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest)?;
        if rest.is_empty() { Ok(()) } else { Err(DemoError::Stray("bytes after DISC".into())) }
    }

    /// Carries out `plan` on `region`, until the plan ends and every reply has arrived.
    pub(super) fn run(
        &mut self,
        region: &mut Region,
        plan: impl Plan,
        progress: &Progress,
    ) -> Result<Tally, DemoError> {
        Run {
            style: self.export.style,
            offered: self.export.flags,
            depth: self.depth,
            connection: &mut self.stream,
            region,
            progress,
            slots: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            bytes: 0,
            unsent: Vec::new(),
            sent: 0,
            ends: VecDeque::new(),
            spare: Vec::new(),
            sequence: 0,
            tally: Tally::default(),
        }
        .run(plan)
    }
}

/// One phase on one connection.
struct Run<'a> {
    connection: &'a mut BufReader<UnixStream>,
    style: HeaderStyle,
    offered: TransmissionFlags,
    depth: usize,
    region: &'a mut Region,
    progress: &'a Progress,
    /// Requests in flight; the low half of a cookie is an index here.
    slots: Vec<Option<InFlight>>,
    free: Vec<usize>,
    in_flight: usize,
    /// Payload of the requests in flight, in bytes.
    bytes: usize,
    /// Requests not yet sent in full start at or after `sent`; `ends` are their ends.
    unsent: Vec<u8>,
    sent: usize,
    ends: VecDeque<usize>,
    /// Buffers for data, to be reused.
    spare: Vec<Vec<u8>>,
    /// Makes every cookie of a connection's phase different, the high half.
    sequence: u64,
    tally: Tally,
}

impl Run<'_> {
    fn run(mut self, mut plan: impl Plan) -> Result<Tally, DemoError> {
        let mut ended = false;
        loop {
            // Ordering: Relaxed; it only asks to stop. The error that caused it is returned by
            // `join`.
            if self.progress.stop.load(Ordering::Relaxed) {
                return Err(DemoError::Stopped);
            }
            while !ended && self.in_flight < self.depth && self.bytes < MAX_IN_FLIGHT {
                match plan.next(self.region, self.offered) {
                    Next::Send(op) => self.begin(op)?,
                    Next::Wait => break,
                    Next::End => ended = true,
                }
            }
            self.write()?;
            if self.in_flight > self.ends.len() {
                self.receive()?;
                // Handle all replies that have arrived, but keep the pipeline full.
                while self.has_whole_reply() {
                    self.receive()?;
                }
            } else if ended && self.in_flight == 0 {
                return Ok(self.tally);
            }
        }
    }

    /// Appends a request, and the data of a write, to the unsent bytes.
    fn begin(&mut self, mut op: Op) -> io::Result<()> {
        self.region.begin(&mut op);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.sequence += 1;
        let cookie = (self.sequence << 32) | slot as u64;
        let request = Request {
            flags: self.flags(&op),
            command: command(op.kind),
            cookie,
            offset: op.offset(),
            len: op.len().into(),
        };
        self.unsent.extend_from_slice(encode(&request, self.style)?.as_slice());
        if op.kind.is_write() {
            put_pattern(&mut self.unsent, op.blocks.clone(), op.version);
        }
        self.ends.push_back(self.unsent.len());
        self.in_flight += 1;
        self.bytes += payload(&op);
        let mut data = Vec::new();
        if op.kind.is_read() {
            data = self.spare.pop().unwrap_or_default();
            data.resize(op.len() as usize, 0);
        }
        let start = Instant::now();
        self.slots[slot] = Some(InFlight { op, cookie, start, received: 0, data, failed: None });
        Ok(())
    }

    fn flags(&self, op: &Op) -> CommandFlags {
        let has = |flag| self.offered.contains(flag);
        match op.kind {
            Kind::WriteFua => CommandFlags::FUA,
            Kind::Read | Kind::LargeRead if op.flagged && has(TransmissionFlags::SEND_DF) => {
                CommandFlags::DF
            }
            Kind::WriteZeroes if op.flagged => CommandFlags::NO_HOLE,
            _ => CommandFlags::NONE,
        }
    }

    /// Sends as much as the socket takes.
    fn write(&mut self) -> Result<(), DemoError> {
        if self.sent < self.unsent.len() {
            match self.connection.get_mut().write(&self.unsent[self.sent..]) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(len) => self.sent += len,
                Err(error) if would_wait(&error) => {}
                Err(error) => return Err(error.into()),
            }
            while self.ends.front().is_some_and(|&end| end <= self.sent) {
                self.ends.pop_front();
            }
        }
        if self.sent == self.unsent.len() {
            self.unsent.clear();
            self.sent = 0;
        }
        Ok(())
    }

    /// Returns whether the next reply can be read without waiting.
    fn has_whole_reply(&self) -> bool {
        let buffer = self.connection.buffer();
        let Ok(Some((reply, used))) = Reply::parse(buffer, self.style) else { return false };
        used + self.data_len(&reply) <= buffer.len()
    }

    /// Returns the bytes of data that follow `reply`.
    fn data_len(&self, reply: &Reply) -> usize {
        match reply.content {
            ReplyContent::Data { len, .. } => len as usize,
            ReplyContent::Simple(Ok(())) => self
                .slots
                .get(reply.cookie as u32 as usize)
                .and_then(Option::as_ref)
                .map_or(0, |f| f.data.len()),
            _ => 0,
        }
    }

    /// Waits for one reply and handles it.
    fn receive(&mut self) -> Result<(), DemoError> {
        let reply = self.header()?;
        let len = self.data_len(&reply);
        let slot = reply.cookie as u32 as usize;
        let stray = || DemoError::Stray(format!("{reply:?}"));
        let flight = self.slots.get_mut(slot).and_then(Option::as_mut).ok_or_else(stray)?;
        let (is_read, chunks) = (flight.op.kind.is_read(), self.style.has_chunks());
        let fits = flight.cookie == reply.cookie
            && match reply.content {
                // After structured replies were negotiated, only they may answer a read.
                ReplyContent::Simple(_) => !(is_read && chunks),
                ReplyContent::Data { .. } | ReplyContent::Hole { .. } => is_read && chunks,
                ReplyContent::Extents { .. } => false, // never asked for
                ReplyContent::None | ReplyContent::Error(_) => chunks,
            };
        if !fits {
            return Err(stray());
        }
        match reply.content {
            ReplyContent::Simple(result) => {
                flight.failed = result.err();
                self.connection.read_exact(&mut flight.data[..len])?;
                flight.received += len;
            }
            ReplyContent::Data { offset, len } | ReplyContent::Hole { offset, len } => {
                let start = offset.checked_sub(flight.op.offset()).map(|start| start as usize);
                let part = start
                    .and_then(|start| flight.data.get_mut(start..start.checked_add(len as usize)?))
                    .ok_or_else(stray)?;
                match reply.content {
                    ReplyContent::Data { .. } => self.connection.read_exact(part)?,
                    _ => part.fill(0),
                }
                flight.received += len as usize;
            }
            ReplyContent::Error(error) => flight.failed = Some(error),
            ReplyContent::None | ReplyContent::Extents { .. } => {}
        }
        if reply.done { self.finish(slot) } else { Ok(()) }
    }

    /// Reads one reply header, whose length is known only from its first bytes.
    fn header(&mut self) -> Result<Reply, DemoError> {
        // Almost always the whole header is in the buffer.
        let connection = &mut self.connection;
        if uninterrupted(|| connection.fill_buf().map(<[u8]>::is_empty))? {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if let Some((reply, used)) = Reply::parse(self.connection.buffer(), self.style)? {
            self.connection.consume(used);
            return Ok(reply);
        }
        let mut header = Vec::new();
        while header.len() < LONGEST_HEADER {
            let mut byte = [0];
            self.connection.read_exact(&mut byte)?;
            header.push(byte[0]);
            if let Some((reply, _)) = Reply::parse(&header, self.style)? {
                return Ok(reply);
            }
        }
        Err(ClientError::BadReplyMagic(0).into())
    }

    /// Checks and counts a request whose last reply has arrived.
    fn finish(&mut self, slot: usize) -> Result<(), DemoError> {
        let Some(InFlight { op, start, received, data, failed, .. }) = self.slots[slot].take()
        else {
            return Ok(());
        };
        let (kind, offset, len) = (op.kind, op.offset(), op.len());
        if let Some(error) = failed {
            let kind = kind.name();
            return Err(DemoError::Failed { kind, offset, len: len.into(), error });
        }
        if kind.is_read() {
            if received != data.len() {
                let what = format!("{received} bytes of {len} read at {offset}");
                return Err(DemoError::Stray(what));
            }
            self.region.verify(&op, &data)?;
            self.spare.push(data);
        }
        self.region.end(&op);
        self.tally.count(kind, start.elapsed(), len);
        // Ordering: Relaxed, both; the progress bar's counters, they publish nothing.
        self.progress.bytes.fetch_add(len.into(), Ordering::Relaxed);
        self.progress.ops.fetch_add(1, Ordering::Relaxed);
        self.free.push(slot);
        self.in_flight -= 1;
        self.bytes -= payload(&op);
        Ok(())
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

/// Retries while the call is interrupted. That happens to a socket with a timeout when the demo is
/// stopped and continued (Ctrl-Z, `fg`), even without a signal handler.
fn uninterrupted<T>(mut read: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match read() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn would_wait(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}
