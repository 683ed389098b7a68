//! A connection of a client: its socket, its phase, and the replies to send.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::rc::Rc;
use std::time::Instant;

use aio_reap::AlignedBuf;
use nbd_protocol::{Agreed, Command, Handshake, HeaderStyle, NbdError, Request, TlsPolicy};
use radix_ctx::{CtxRef, Id};
use rustix::event::epoll::EventFlags;
use socket2::Socket;

use crate::connection_limits::Permit;
use crate::export::Export;
use crate::extents;
use crate::memory::{Account, BufferPool, Limit};
use crate::registry::{Connection, Listed};
use crate::requests::{Step, WorkerImage};
use crate::tls::{Tls, Wire};

/// Most requests and replies that a connection may have outstanding. Beyond it no further requests
/// are read.
pub(crate) const OUTSTANDING: usize = 1024;
/// Most pieces of one send: the headers and payloads of 64 replies.
const PIECES: usize = 128;
/// The kernel's memory for one send is at most twice its bytes plus this.
const OVERHEAD: usize = 4096;
/// The kernel's memory for one send in addition to its bytes. Measured on Linux 6.18: 768 for up to
/// 128 bytes, which are eight replies without data; 1,280 for 512 bytes.
const SEND_COST: usize = 640;

/// The phase of a connection.
pub(crate) enum Phase {
    /// The client negotiates.
    Handshake(Handshake),
    Transmission(Session),
    /// No more input is read; replies are still sent.
    Draining,
    /// Everything was sent. Further input is discarded, because closing a TCP connection with unread
    /// input resets it, and the client may lose replies.
    Lingering,
}

pub(crate) struct Conn {
    pub(crate) socket: Socket,
    /// The TLS session, if the client has asked for one.
    pub(crate) tls: Option<Box<Tls>>,
    /// TLS was started; the session may have ended.
    pub(crate) used_tls: bool,
    /// The context of the connection. Its operations have references to it.
    pub(crate) ctx: CtxRef<Connection>,
    /// The place of the connection within the server's limits.
    pub(crate) permit: Permit,
    /// The entry in the list of sessions, with what the list shows of the connection.
    pub(crate) listed: Listed,
    pub(crate) phase: Phase,
    /// When the connection is closed: set during its handshake, until the last replies of a failed handshake
    /// are sent, and in [`Phase::Lingering`].
    pub(crate) deadline: Option<Instant>,
    pub(crate) account: Account,
    /// Requests that were started and have no reply yet.
    pub(crate) active: usize,
    /// Bytes received and not parsed: a part of a header, or the bytes of and after a request that
    /// must wait.
    pub(crate) unparsed: Vec<u8>,
    /// What the next request waits for.
    pub(crate) blocked: Option<Limit>,
    /// Bytes received so far.
    pub(crate) received: u64,
    /// When a WRITE's payload last made progress, and the bytes received until then.
    pub(crate) stalled: Option<(Instant, u64)>,
    /// Requests refused so far.
    pub(crate) refused: u64,
    pub(crate) out: Output,
    /// A TCP connection: closing it with unread input resets it.
    pub(crate) tcp: bool,
    /// The connection is in the worker's list of sendable connections.
    pub(crate) send_queued: bool,
    /// The events that are registered with epoll.
    pub(crate) registered: EventFlags,
}

impl Conn {
    /// Makes a connection before its handshake. The greeting is queued to be sent.
    pub(crate) fn new(
        socket: Socket,
        ctx: CtxRef<Connection>,
        permit: Permit,
        listed: Listed,
        deadline: Instant,
        policy: TlsPolicy,
    ) -> Self {
        let mut out = Output { reply_cost: 1, ..Output::default() };
        let handshake =
            Handshake::new(&mut out.handshake).extended_headers().base_allocation().tls(policy);
        Self {
            tcp: socket.local_addr().is_ok_and(|address| !address.is_unix()),
            socket,
            tls: None,
            used_tls: false,
            ctx,
            permit,
            listed,
            phase: Phase::Handshake(handshake),
            deadline: Some(deadline),
            account: Account::default(),
            active: 0,
            unparsed: Vec::new(),
            blocked: None,
            received: 0,
            stalled: None,
            refused: 0,
            out,
            send_queued: false,
            registered: EventFlags::IN,
        }
    }

    pub(crate) fn id(&self) -> Id {
        CtxRef::id(&self.ctx)
    }

    /// Returns the number of requests whose reply was not sent completely.
    pub(crate) fn outstanding(&self) -> usize {
        self.active + self.out.len()
    }

    /// Returns whether input from the client is wanted now.
    pub(crate) fn wants_input(&self) -> bool {
        match &self.phase {
            Phase::Handshake(_) | Phase::Transmission(_) => self.blocked.is_none(),
            Phase::Draining => false,
            Phase::Lingering => true,
        }
    }

    /// Returns whether TLS holds bytes that the socket has not taken.
    fn holds_output(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.holds_output())
    }

    /// Returns whether TLS holds wanted input, which epoll does not report.
    pub(crate) fn has_plaintext(&self) -> bool {
        self.wants_input() && self.tls.as_ref().is_some_and(|tls| tls.has_plaintext())
    }

    /// Starts TLS, after the reply that announces it was sent.
    pub(crate) fn start_tls(&mut self, tls: Box<Tls>, memory: &mut BufferPool) -> io::Result<()> {
        // No plaintext may follow this reply. None is queued, because the client waits for it.
        self.out.send(&mut &self.socket, memory, &mut self.account)?;
        self.tls = Some(tls);
        self.used_tls = true;
        Ok(())
    }

    /// Returns the events that epoll should watch for.
    pub(crate) fn interest(&self) -> EventFlags {
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, self.wants_input());
        interest.set(EventFlags::OUT, !self.out.is_empty() || self.holds_output());
        interest
    }

    /// Returns whether every request was answered and no more input is wanted.
    pub(crate) fn is_finished(&self) -> bool {
        let is_sent = self.out.is_empty() && !self.holds_output();
        matches!(self.phase, Phase::Draining) && self.active == 0 && is_sent
    }

    /// Adds the connection to the list of sendable ones.
    pub(crate) fn queue_send(&mut self, sendable: &mut Vec<Id>) {
        if !std::mem::replace(&mut self.send_queued, true) {
            sendable.push(self.id());
        }
    }

    /// Adds the connection to the list of blocked ones. Also adds it to the sendable ones, so that
    /// its events are registered with epoll again.
    pub(crate) fn block(
        &mut self,
        wait: Limit,
        blocked: &mut VecDeque<Id>,
        sendable: &mut Vec<Id>,
    ) {
        if self.blocked.replace(wait).is_none() {
            blocked.push_back(self.id());
        }
        self.queue_send(sendable);
    }

    /// Returns since when the client has held memory without progress, because it takes no replies
    /// or sends no more of a payload.
    pub(crate) fn stuck(&self) -> Option<Instant> {
        let stalled = self.stalled.map(|(since, _)| since);
        [self.out.stuck, stalled].into_iter().flatten().min()
    }

    /// Queues the reply of a request, and releases the buffer that the request no longer needs.
    pub(crate) fn queue_reply(
        &mut self,
        mut step: Step,
        memory: &mut BufferPool,
        sendable: &mut Vec<Id>,
    ) {
        if let Some(spent) = step.spent.take() {
            memory.release(spent, Some(&mut self.account));
        }
        self.active -= 1;
        self.out.replies.push_back(step);
        self.queue_send(sendable);
    }

    /// Returns whether the last request is a long WRITE, see [`Session::writes_long`].
    pub(crate) fn writes_long(&self) -> bool {
        matches!(&self.phase, Phase::Transmission(session) if session.writes_long())
    }

    /// Receives available input: the missing part of a WRITE's payload into its buffer, and later
    /// bytes into `ahead`.
    pub(crate) fn receive(&mut self, ahead: &mut [u8]) -> io::Result<Received> {
        let Self { phase, socket, tls, .. } = self;
        let mut wire = Wire { socket, tls: tls.as_deref_mut() };
        let payload = match phase {
            Phase::Transmission(session) => session.payload(),
            _ => None,
        };
        let received = match payload {
            None => wire.read(ahead).map(|count| Received { count, missing: 0, ahead: count })?,
            Some((buf, filled)) => {
                let missing = buf.len() - *filled;
                let space = IoSliceMut::new(&mut buf[*filled..]);
                let count = wire.read_vectored(&mut [space, IoSliceMut::new(ahead)])?;
                let part = count.min(missing);
                *filled += part;
                Received { count, missing: missing - part, ahead: count - part }
            }
        };
        self.received += received.count as u64;
        Ok(received)
    }
}

/// The result of [`Conn::receive`].
pub(crate) struct Received {
    /// Bytes received; 0 at the end of input.
    pub(crate) count: usize,
    /// Bytes of the payload that are still missing.
    pub(crate) missing: usize,
    /// Bytes received into `ahead`.
    pub(crate) ahead: usize,
}

/// The output of a connection, in the order of sending.
#[derive(Default)]
pub(crate) struct Output {
    /// Bytes of the handshake, which precede all replies.
    pub(crate) handshake: Vec<u8>,
    replies: VecDeque<Step>,
    /// Bytes of the first handshake or reply that were sent.
    sent: usize,
    /// The kernel's memory per reply of the last send, while the client has not read it.
    pub(crate) reply_cost: usize,
    /// An upper bound of the sent bytes that the client has not read, with the kernel's overhead.
    pub(crate) unread: usize,
    /// Since when the client has taken no byte.
    pub(crate) stuck: Option<Instant>,
}

impl Output {
    /// Returns the number of replies that were not sent completely.
    pub(crate) fn len(&self) -> usize {
        self.replies.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.handshake.is_empty() && self.replies.is_empty()
    }

    /// Reserves memory for `replies` more replies. Returns whether there is enough.
    pub(crate) fn reserve(&mut self, replies: usize) -> bool {
        self.replies.try_reserve(replies).is_ok()
    }

    /// Sends all output. Releases the buffers of sent replies to `memory`. Fails with `WouldBlock` if the
    /// socket takes no more now.
    pub(crate) fn send(
        &mut self,
        socket: &mut impl Write,
        memory: &mut BufferPool,
        account: &mut Account,
    ) -> io::Result<()> {
        while !self.is_empty() {
            let mut pieces = [IoSlice::new(&[]); PIECES];
            let (used, wanted) = self.gather(&mut pieces);
            match socket.write_vectored(&pieces[..used]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    let before = self.replies.len();
                    self.advance(count, memory, account);
                    let left = (before - self.replies.len()).max(1);
                    self.reply_cost = (count + SEND_COST) / left;
                    self.unread = self.unread.saturating_add(2 * count + OVERHEAD);
                    self.stuck = None;
                    if count < wanted {
                        // A stream socket accepts fewer bytes only if it is full.
                        return Err(ErrorKind::WouldBlock.into());
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fills `pieces` from the front of the queue. Returns their number and their bytes.
    fn gather<'a>(&'a self, pieces: &mut [IoSlice<'a>]) -> (usize, usize) {
        let mut skip = self.sent;
        let (mut used, mut bytes) = (0, 0);
        let replies = self
            .replies
            .iter()
            .flat_map(|reply| [reply.header.as_slice(), reply.data.as_deref().unwrap_or_default()]);
        for piece in std::iter::once(&self.handshake[..]).chain(replies) {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            if skipped == piece.len() {
                continue;
            }
            if used == pieces.len() {
                break;
            }
            pieces[used] = IoSlice::new(&piece[skipped..]);
            used += 1;
            bytes += piece.len() - skipped;
        }
        (used, bytes)
    }

    fn advance(&mut self, count: usize, memory: &mut BufferPool, account: &mut Account) {
        self.sent += count;
        if !self.handshake.is_empty() {
            if self.sent < self.handshake.len() {
                return;
            }
            self.sent -= self.handshake.len();
            self.handshake.clear();
        }
        while let Some(first) = self.replies.front() {
            if self.sent < first.len() {
                return;
            }
            self.sent -= first.len();
            if let Some(data) = self.replies.pop_front().and_then(|reply| reply.data) {
                memory.release(data, Some(account));
            }
        }
    }

    /// Releases all buffers of a closed connection.
    pub(crate) fn discard(&mut self, memory: &mut BufferPool) {
        self.replies.drain(..).for_each(|reply| reply.release(memory));
    }
}

/// The shortest payload that is received in place. For less, another receive costs as much
/// as the copy.
const IN_PLACE: usize = 32 << 10;

/// The negotiated export, and the state of the request stream.
pub(crate) struct Session {
    /// The export with the size that the client was told; the image may have grown since.
    export: Export,
    pub(crate) image: Rc<WorkerImage>,
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
    Blocked(Limit),
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
        Self { export, image, agreed, stream: Stream::Header, last_payload: 0 }
    }

    /// Returns the granularity of the export's extents, in bytes.
    pub(crate) fn unit(&self) -> u64 {
        self.export.info.min_block.max(1).into()
    }

    /// Returns the style of reply headers.
    pub(crate) fn style(&self) -> HeaderStyle {
        self.agreed.style
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
                            Ok(Some(taken)) => buf = Some(taken),
                            Ok(None) => checked = Err(NbdError::NoMem),
                            Err(limit) => return Next::Blocked(limit),
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
    /// copied. Most often another long WRITE follows a long WRITE.
    pub(crate) fn writes_long(&self) -> bool {
        self.last_payload >= IN_PLACE
    }

    /// Returns whether a part of a WRITE's payload is missing.
    pub(crate) fn is_inside_payload(&self) -> bool {
        matches!(self.stream, Stream::Payload { .. })
    }

    /// Returns the buffer of an incomplete WRITE, and the number of bytes in it.
    fn payload(&mut self) -> Option<(&mut AlignedBuf, &mut usize)> {
        match &mut self.stream {
            Stream::Payload { buf, filled, .. } => Some((buf, filled)),
            _ => None,
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

#[cfg(test)]
mod tests {
    use nbd_protocol::ReplyHeader;

    use super::*;

    /// A socket that takes `step` bytes at a time.
    struct Trickle {
        taken: Vec<u8>,
        step: usize,
    }

    impl Write for Trickle {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.step);
            self.taken.extend(&bytes[..count]);
            Ok(count)
        }

        fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
            let flat: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
            self.write(&flat)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The kernel charges each send a fixed cost, so a reply that is sent alone costs more.
    #[test]
    fn a_reply_that_leaves_alone_costs_the_kernel_more_than_one_of_many() {
        let mut memory = BufferPool::new(0);
        let (mut account, mut out) = (Account::default(), Output::default());
        let mut socket = Trickle { taken: Vec::new(), step: 1 << 20 };
        let costs = [1, 32].map(|replies| {
            for cookie in 0..replies {
                let header = ReplyHeader::simple(cookie, Ok(()));
                out.replies.push_back(Step { header, data: None, spent: None });
            }
            out.send(&mut socket, &mut memory, &mut account).unwrap();
            out.reply_cost
        });
        assert_eq!(costs, [16 + SEND_COST, 16 + SEND_COST / 32]);
    }

    #[test]
    fn output_resumes_at_any_byte_and_gives_buffers_back() {
        for step in [1, 3, 15, 16, 17, 100, 5000, 1 << 20] {
            let mut memory = BufferPool::new(0);
            let (mut account, mut out) = (Account::default(), Output::default());
            let mut expected = b"hello".to_vec();
            out.handshake = expected.clone();
            for cookie in 0..200 {
                let mut data = memory.acquire(100, &mut account).unwrap().unwrap();
                data.fill(cookie as u8);
                let header = ReplyHeader::simple(cookie, Ok(()));
                expected.extend(header.as_slice());
                let data = (cookie % 3 == 0).then_some(data);
                expected.extend(data.as_deref().unwrap_or_default());
                out.replies.push_back(Step { header, data, spent: None });
            }
            let mut socket = Trickle { taken: Vec::new(), step };
            while out.send(&mut socket, &mut memory, &mut account).is_err() {}
            assert!(socket.taken == expected, "step {step}");
            assert!(out.is_empty());
        }
    }
}
