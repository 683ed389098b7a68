//! One connection: the requests that were sent, and their replies.
//!
//! A reply is matched to its request by the cookie. The device uses each cookie once, so a repeated
//! or late reply matches no request. A reply is checked against its request before any byte is
//! stored. A reply that does not match ends the connection, and its bytes are not used.

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

use nbd_protocol::{
    CommandFlags, Connected, Extent, HeaderStyle, NbdError, Reply, ReplyContent, wire::cmd,
};

use super::error::UpstreamError;
use super::link::Link;
use super::operation::{Kind, Operation, Target};
use super::shared::Export;

/// Size of the receive buffer. A guess.
const INPUT: usize = 256 << 10;
/// Most bytes to receive before the other connections get their turn. A guess.
const BUDGET: usize = 4 * INPUT;

/// Longest WRITE that is merged from several operations, in bytes. A guess.
const MERGED: u64 = 2 << 20;
/// The same limit for a READ. Its first operation waits for the bytes of the last, so it is
/// shorter. A guess: a client that reads ahead in pieces of this size has several in flight.
const MERGED_READ: u64 = 128 << 10;
/// Longest WRITE_ZEROES and BLOCK_STATUS. The field has 32 bits; other clients use up to this
/// length.
const LONGEST: u64 = 1 << 30;

/// Failed attempts to connect since a connection last answered a request. A successful handshake
/// does not reset the count, because it does not prove that the server works.
#[derive(Clone, Copy, Default)]
pub(super) struct Attempts(u32);

impl Attempts {
    /// The pause after the first failure. Each further failure doubles it.
    pub(super) const FIRST: Duration = Duration::from_millis(50);
    pub(super) const LONGEST: Duration = Duration::from_secs(5);

    /// Counts a failure. Returns its number, from 1, and the pause before the next attempt.
    pub(super) fn failed(&mut self) -> (u32, Duration) {
        self.0 = self.0.saturating_add(1);
        (self.0, (Self::FIRST * (1 << (self.0 - 1).min(10))).min(Self::LONGEST))
    }

    /// Counts a lost connection. Returns the pause before the next attempt, which is zero if the
    /// connection had answered a request.
    pub(super) fn lost(&mut self, connection: &Connection) -> Duration {
        if connection.has_answered {
            *self = Self::default();
            return Duration::ZERO;
        }
        self.failed().1
    }
}

/// A request that was sent, or is partly sent.
pub(super) struct Request {
    pub(super) cookie: u64,
    pub(super) kind: Kind,
    pub(super) range: Range<u64>,
    /// Consecutive operations on the device. A single operation may be covered in part.
    pub(super) operations: Vec<Operation>,
    /// The device's epoch when the request was sent.
    pub(super) epoch: u64,
    /// For a flush: it covers changes of the journal with lower numbers.
    pub(super) covers: u64,
    pub(super) error: Option<NbdError>,
    sent: Instant,
    /// The position of the request's end in the stream of sent bytes.
    end: u64,
    /// The ranges of a READ that replies have covered.
    got: Vec<Range<u64>>,
}

impl Request {
    pub(super) fn new(
        cookie: u64,
        kind: Kind,
        range: Range<u64>,
        operations: Vec<Operation>,
    ) -> Self {
        let (sent, got) = (Instant::now(), Vec::new());
        Self {
            cookie,
            kind,
            range,
            operations,
            epoch: 0,
            covers: 0,
            error: None,
            sent,
            end: 0,
            got,
        }
    }

    /// Returns whether one error applies to all operations of the request.
    pub(super) fn is_flush_or_replay(&self) -> bool {
        let replay = |operation: &Operation| matches!(operation.target, Target::Replay(_));
        self.kind == Kind::Flush || self.operations.iter().any(replay)
    }

    /// Records that a reply carries these bytes of the request. Refuses bytes out of range or sent
    /// twice.
    fn expect(&mut self, offset: u64, len: u64) -> Result<(), UpstreamError> {
        let Range { start, end } = self.range;
        if offset < start || offset.checked_add(len).is_none_or(|till| till > end) {
            return Err(UpstreamError::OutOfRange { offset, len, start, asked: end - start });
        }
        if self.got.iter().any(|got| offset < got.end && got.start < offset + len) {
            return Err(UpstreamError::Repeated(offset));
        }
        match self.got.last_mut().filter(|last| last.end == offset) {
            Some(last) => last.end += len,
            None => self.got.push(offset..offset + len),
        }
        Ok(())
    }

    fn fill(&mut self, offset: u64, bytes: &[u8]) {
        self.operations.iter_mut().for_each(|operation| operation.fill(offset, bytes));
    }
}

impl Export {
    /// Makes a request from the rest of an operation, and merges operations from the queue that
    /// continue it.
    pub(super) fn request(
        &self,
        cookie: u64,
        first: Operation,
        queue: &mut VecDeque<Operation>,
    ) -> Request {
        let kind = first.kind;
        let unit = u64::from(self.min_block);
        let longest = match kind {
            Kind::Read | Kind::Write { .. } => u64::from(self.max_block) / unit * unit,
            _ => LONGEST,
        };
        if kind == Kind::Flush {
            let mut operations = vec![first];
            while queue.front().is_some_and(|next| operations[0].continues_with(next)) {
                operations.extend(queue.pop_front());
            }
            return Request::new(cookie, kind, 0..0, operations);
        }
        let start = first.next();
        let mut end = first.range().end.min(start + longest.max(unit));
        let whole = end == first.range().end;
        let merged = if kind == Kind::Read { MERGED_READ } else { MERGED };
        let most = start + longest.min(merged);
        let mut operations = vec![first];
        while let (true, Some(last), Some(next)) = (whole, operations.last(), queue.front()) {
            if !last.continues_with(next) || end + next.len > most {
                break;
            }
            end = next.range().end;
            operations.extend(queue.pop_front());
        }
        Request::new(cookie, kind, start..end, operations)
    }
}

/// The payload that follows a reply's header.
struct Following {
    cookie: u64,
    offset: u64,
    left: u64,
    done: bool,
    /// The bytes of the extents received so far.
    extents: Option<Vec<u8>>,
}

/// See the [module](self).
pub(super) struct Connection {
    pub(super) link: Link,
    style: HeaderStyle,
    /// The id of the metadata context base:allocation, if the server has it.
    pub(super) context: Option<u32>,
    out: Vec<u8>,
    /// Bytes of `out` that were written to the link.
    taken: usize,
    /// Bytes written to the link since it was made.
    sent: u64,
    pub(super) requests: HashMap<u64, Request>,
    input: Box<[u8]>,
    unread: Range<usize>,
    following: Option<Following>,
    has_answered: bool,
}

impl Connection {
    pub(super) fn new(link: Link, connected: &Connected) -> Self {
        Self {
            link,
            style: connected.style,
            context: connected.allocation,
            out: Vec::new(),
            taken: 0,
            sent: 0,
            requests: HashMap::new(),
            input: vec![0; INPUT].into(),
            unread: 0..0,
            following: None,
            has_answered: false,
        }
    }

    /// Bytes that have yet to be written to the link.
    pub(super) fn backlog(&self) -> usize {
        self.out.len() - self.taken
    }

    pub(super) fn wants_to_send(&self) -> bool {
        self.backlog() > 0 || self.link.holds_output()
    }

    /// When the oldest unanswered request was sent.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.requests.values().map(|request| request.sent).min()
    }

    /// Queues a request, which the next [`send`](Self::send) writes.
    pub(super) fn push(&mut self, mut request: Request, fua: bool) {
        let Range { start, end } = request.range;
        let (command, mut flags) = match request.kind {
            Kind::Read => (cmd::READ, CommandFlags::NONE),
            Kind::Write { .. } if self.style.is_extended() => {
                (cmd::WRITE, CommandFlags::PAYLOAD_LEN)
            }
            Kind::Write { .. } => (cmd::WRITE, CommandFlags::NONE),
            Kind::Zeros { no_hole: true } => (cmd::WRITE_ZEROES, CommandFlags::NO_HOLE),
            Kind::Zeros { no_hole: false } => (cmd::WRITE_ZEROES, CommandFlags::NONE),
            Kind::Flush => (cmd::FLUSH, CommandFlags::NONE),
            Kind::Status => (cmd::BLOCK_STATUS, CommandFlags::NONE),
        };
        if fua {
            flags |= CommandFlags::FUA;
        }
        let Request { cookie, .. } = request;
        let header =
            nbd_protocol::Request { flags, command, cookie, offset: start, len: end - start };
        let header = header.encode(self.style).expect("no request is 4 GiB long");
        self.out.extend_from_slice(header.as_slice());
        if let Kind::Write { .. } = request.kind {
            for operation in &request.operations {
                let from = start.max(operation.offset) - operation.offset;
                let till = end.min(operation.range().end) - operation.offset;
                operation.payload(from..till, &mut self.out);
            }
        }
        request.end = self.sent + self.backlog() as u64;
        self.requests.insert(cookie, request);
    }

    /// Sends a disconnect request, as far as the socket takes it at once.
    pub(super) fn disconnect(&mut self) {
        let (flags, command) = (CommandFlags::NONE, cmd::DISC);
        let goodbye = nbd_protocol::Request { flags, command, cookie: 0, offset: 0, len: 0 };
        if let Ok(header) = goodbye.encode(self.style) {
            self.out.extend_from_slice(header.as_slice());
            let _ = self.send(); // an error does not matter: the connection is closed next
        }
    }

    /// Sends as much as the socket takes.
    pub(super) fn send(&mut self) -> Result<(), UpstreamError> {
        let done = loop {
            if self.backlog() == 0 {
                break self.link.flush();
            }
            match self.link.write(&self.out[self.taken..]) {
                Ok(count) => {
                    (self.taken, self.sent) = (self.taken + count, self.sent + count as u64)
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        if self.backlog() == 0 {
            self.out.clear();
            self.out.shrink_to(INPUT);
            self.taken = 0;
        }
        match done {
            Err(error) if error.kind() != ErrorKind::WouldBlock => {
                Err(UpstreamError::Socket(error))
            }
            _ => Ok(()),
        }
    }

    /// Receives what is available, and appends completed requests to `ended`. Returns whether more
    /// may be available.
    pub(super) fn receive(&mut self, ended: &mut Vec<Request>) -> Result<bool, UpstreamError> {
        let mut budget = BUDGET;
        while budget > 0 {
            if self.unread.start > 0 {
                self.input.copy_within(self.unread.clone(), 0);
                self.unread = 0..self.unread.len();
            }
            let room = &mut self.input[self.unread.end..];
            let whole = room.len();
            let count = match self.link.read(room) {
                Ok(0) => return Err(UpstreamError::Closed),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(UpstreamError::Socket(error)),
            };
            self.unread.end += count;
            budget = budget.saturating_sub(count);
            while self.advance(ended)? {}
            if count < whole && !self.link.is_secure() {
                return Ok(false); // more would have filled the buffer
            }
        }
        Ok(true)
    }

    /// Handles one header, or a part of a payload. Returns false if it needs more bytes.
    fn advance(&mut self, ended: &mut Vec<Request>) -> Result<bool, UpstreamError> {
        if let Some(following) = &mut self.following {
            let there = &self.input[self.unread.clone()];
            let count = there.len().min(following.left as usize);
            let Some(request) = self.requests.get_mut(&following.cookie) else {
                return Err(UpstreamError::UnknownCookie(following.cookie));
            };
            match &mut following.extents {
                Some(extents) => extents.extend_from_slice(&there[..count]),
                None => request.fill(following.offset, &there[..count]),
            }
            self.unread.start += count;
            following.offset += count as u64;
            following.left -= count as u64;
            if following.left > 0 {
                return Ok(false);
            }
            let following = self.following.take().expect("it was there");
            if let Some(bytes) = following.extents {
                let found = Extent::parse_all(&bytes, self.style);
                if let Some(Operation { target: Target::Extents(extents, _), .. }) =
                    request.operations.first_mut()
                {
                    extents.extend(found);
                }
            }
            if following.done {
                self.end(following.cookie, ended)?;
            }
            return Ok(true);
        }
        let Some((reply, len)) = Reply::parse(&self.input[self.unread.clone()], self.style)? else {
            return Ok(false);
        };
        self.unread.start += len;
        self.accept(&reply, ended)?;
        Ok(true)
    }

    fn accept(&mut self, reply: &Reply, ended: &mut Vec<Request>) -> Result<(), UpstreamError> {
        let Reply { cookie, request_offset, done, ref content } = *reply;
        let request = self.requests.get_mut(&cookie);
        let request = request.ok_or(UpstreamError::UnknownCookie(cookie))?;
        if request.end > self.sent {
            return Err(UpstreamError::Early(cookie));
        }
        let start = request.range.start;
        if let Some(is) = request_offset.filter(|&is| is != start) {
            return Err(UpstreamError::OtherOffset { was: start, is });
        }
        let following = |offset, left: u64, extents| {
            (left > 0).then_some(Following { cookie, offset, left, done, extents })
        };
        let chunks = self.style.has_chunks();
        match (content, request.kind) {
            (ReplyContent::Simple(Ok(())), Kind::Read) if !chunks => {
                let Range { start, end } = request.range;
                request.expect(start, end - start)?;
                self.following = following(start, end - start, None);
            }
            (ReplyContent::Simple(Ok(())), Kind::Read | Kind::Status) => {
                return Err(UpstreamError::OtherKind(cookie));
            }
            (ReplyContent::Simple(Ok(())) | ReplyContent::None, _) => {}
            (ReplyContent::Simple(Err(error)) | ReplyContent::Error(error), _) => {
                request.error.get_or_insert(*error);
            }
            (&ReplyContent::Data { offset, len }, Kind::Read) => {
                request.expect(offset, len.into())?;
                self.following = following(offset, len.into(), None);
            }
            (&ReplyContent::Hole { offset, len }, Kind::Read) => {
                request.expect(offset, len.into())?;
                request.fill(offset, &vec![0; len as usize]);
            }
            (&ReplyContent::Extents { context, len }, Kind::Status)
                if Some(context) == self.context && len as usize <= INPUT =>
            {
                request.expect(start, 1)?; // a second chunk of this context is an error
                self.following = following(0, len.into(), Some(Vec::new()));
            }
            _ => return Err(UpstreamError::OtherKind(cookie)),
        }
        if done && self.following.is_none() {
            self.end(cookie, ended)?;
        }
        Ok(())
    }

    /// Ends a request whose reply is complete.
    fn end(&mut self, cookie: u64, ended: &mut Vec<Request>) -> Result<(), UpstreamError> {
        let Some(request) = self.requests.get(&cookie) else {
            return Err(UpstreamError::UnknownCookie(cookie));
        };
        if request.error.is_none() {
            let asked = request.range.end - request.range.start;
            let got = request.got.iter().map(|got| got.end - got.start).sum();
            if request.kind == Kind::Read && got != asked {
                return Err(UpstreamError::Short { asked, got });
            }
            if request.kind == Kind::Status && got == 0 {
                return Err(UpstreamError::Short { asked, got });
            }
        }
        self.has_answered = true;
        ended.extend(self.requests.remove(&cookie));
        Ok(())
    }
}
