//! Requests between their header and their reply: what to ask of the engine, and what next.
//!
//! ```text
//!  READ [─read─►] reply with data            TRIM ───────punch──► [fdatasync] ──► reply
//!  WRITE ─write─► [fdatasync if FUA] ► reply  WRITE_ZEROES ─punch─► or zero ─► or write zeros ─┘
//!  FLUSH ─fdatasync─► reply                   CACHE ─will-need─► reply
//!  BLOCK_STATUS: see extents
//! ```
//!
//! What is kept in memory is read without the engine, and what changes the image is forgotten there
//! before it goes on: see [`blocks`](crate::blocks).
//!
//! A request has at most one operation at a time, in the engine or waiting for a place there: see
//! [`admission`](crate::admission). The engine is given no more than it works on at a time, so it
//! refuses none. Each operation in it has an id of its own, which is all that the engine is told of
//! it: see [`contexts`](crate::contexts).

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use aio_reap::{AlignedBuf, AllocateMode, CompletionQueue, Engine, File, SubmitError};
use bufcache::{Invalidation, Load};
use nbd_protocol::{Command, NbdError, Request};
use radix_ctx::{CtxRef, CtxTable, Id, InsertError, LookupError, TableStats};
use tracing::warn;

use crate::admission::{Admission, WaitStats};
use crate::blocks::Fill;
use crate::contexts::{Connection, Lost, Stray};
use crate::export::ExportTable;
use crate::extents::Maps;
use crate::memory::ALIGN;
use crate::operation::{Operation, Stage, Step, Then, Zeroes};

/// Longest run of zeros written at once where the file system cannot make them.
const ZEROS: usize = 1 << 20;

/// Failures of the image, and completions of nothing, that are all logged.
const LOGGED: u64 = 64;

/// All of the first, then fewer and fewer: a dead disk must not fill another.
fn is_logged(count: u64) -> bool {
    count <= LOGGED || count.is_power_of_two()
}

fn zeros() -> &'static [u8] {
    static ZERO: OnceLock<&'static [u8]> = OnceLock::new();
    ZERO.get_or_init(|| Box::leak(Box::new(AlignedBuf::zeroed(ZEROS, ALIGN))))
}

/// What a worker counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    /// Reads that were answered from memory.
    pub(crate) hits: u64,
    pub(crate) writes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) flushes: u64,
    pub(crate) other: u64,
    pub(crate) errors: u64,
    /// Of those, the image's own.
    pub(crate) failures: u64,
    /// Completions whose connection was closed.
    pub(crate) closed: u64,
    /// Completions of nothing: no operation in the engine had that id.
    pub(crate) unknown: u64,
}

/// An operation that waits for a place in the engine, and its buffer.
type Waiting = (Operation, Option<AlignedBuf>);

/// An operation that has ended.
struct Ended {
    operation: Operation,
    result: io::Result<usize>,
    buf: Option<AlignedBuf>,
}

/// How much a worker takes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Operations in the engine.
    pub(crate) depth: usize,
    /// Operations in all: those, and those that wait for a place there.
    pub(crate) most: usize,
}

/// A worker's requests in flight, and the engine that works on them.
pub(crate) struct Requests {
    pub(crate) engine: Rc<Engine>,
    /// By index of the export table's files.
    files: Vec<File>,
    /// Those in the engine.
    operations: CtxTable<Operation>,
    in_engine: usize,
    /// Places there.
    depth: usize,
    /// If something waits, every place is taken.
    waiting: Admission<Waiting>,
    /// What waited, and was answered without the engine.
    answered: VecDeque<(Operation, Step)>,
    most: usize,
    /// What changed the image, and has yet to be forgotten: rare, as a read of it is waited for.
    forgetting: Vec<(Ended, Invalidation)>,
    /// BLOCK_STATUS requests, each of which a thread looks after.
    maps: Maps,
    /// Has [`complete`](Self::complete) called once that read is over.
    waker: Waker,
    /// Room for claims, to be used again.
    loads: Vec<Vec<Load>>,
    fills: CompletionQueue<Fill>,
    transfers: CompletionQueue<AlignedBuf>,
    others: CompletionQueue<()>,
    zeros: CompletionQueue<&'static [u8]>,
    exports: Arc<ExportTable>,
    pub(crate) counters: Counters,
}

impl Requests {
    /// Takes requests as the limits say. The waker is called, by any thread, when
    /// [`complete`](Self::complete) should be.
    pub(crate) fn new(
        engine: Rc<Engine>,
        exports: &Arc<ExportTable>,
        Limits { depth, most }: Limits,
        waker: Waker,
    ) -> io::Result<Self> {
        let operations = CtxTable::builder().max_contexts(most as u64).build();
        let files = exports.files.iter().map(|file| engine.attach(file.try_clone()?));
        Ok(Self {
            files: files.collect::<io::Result<_>>()?,
            engine,
            operations: operations.map_err(io::Error::from)?,
            in_engine: 0,
            depth,
            waiting: Admission::new(exports.len())?,
            answered: VecDeque::new(),
            most,
            forgetting: Vec::new(),
            maps: Maps::new(exports, &waker),
            waker,
            loads: Vec::new(),
            fills: CompletionQueue::new(),
            transfers: CompletionQueue::new(),
            others: CompletionQueue::new(),
            zeros: CompletionQueue::new(),
            exports: Arc::clone(exports),
            counters: Counters::default(),
        })
    }

    pub(crate) fn has_room(&self) -> bool {
        self.in_engine + self.waiting.len() + self.forgetting.len() + self.maps.len() < self.most
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_engine == 0
            && self.waiting.is_empty()
            && self.answered.is_empty()
            && self.forgetting.is_empty()
            && self.maps.len() == 0
    }

    /// Whether something is waited for that the waker tells of.
    pub(crate) fn is_forgetting(&self) -> bool {
        !self.forgetting.is_empty() || self.maps.len() > 0
    }

    /// Whether [`complete`](Self::complete) has nothing to return.
    pub(crate) fn nothing_completed(&self) -> bool {
        self.answered.is_empty()
            && self.fills.is_empty()
            && self.transfers.is_empty()
            && self.others.is_empty()
            && self.zeros.is_empty()
    }

    /// Carries out a request, or at least begins to. `Some` if the reply is there already.
    ///
    /// `buf` is a READ's or BLOCK_STATUS's buffer, or a WRITE's data.
    pub(crate) fn start(
        &mut self,
        conn: &CtxRef<Connection>,
        (export, structured): (usize, bool),
        request: Request,
        command: Command,
        mut buf: Option<AlignedBuf>,
    ) -> Option<Step> {
        self.count(command, request.len);
        let stage = match command {
            Command::BlockStatus { one } => {
                return self.maps.ask(conn, export, request, one, buf?);
            }
            Command::Read { .. } => Stage::Read,
            Command::Write { fua } => Stage::Write { fua },
            Command::Flush => Stage::Sync,
            Command::Trim { fua } => Stage::Punch { fua, zeroes: None },
            Command::WriteZeroes { fua, no_hole: false, fast } => {
                Stage::Punch { fua, zeroes: Some(Zeroes { fast }) }
            }
            Command::WriteZeroes { fua, no_hole: true, fast } => {
                Stage::ZeroRange { fua, zeroes: Zeroes { fast } }
            }
            Command::Cache | Command::Disconnect => Stage::Advise,
        };
        let (conn, file) = (conn.clone(), self.exports.get(export).file);
        let operation = Operation { conn, export, file, structured, begun: false, request, stage };
        if request.len == 0 && command != Command::Flush {
            // fallocate refuses an empty range, and nothing else has anything to do.
            return Some(operation.reply(Ok(()), buf));
        }
        if let (Stage::Read, Some(bytes)) = (stage, &mut buf) {
            bytes.set_len(request.len as usize); // of its room, which may be more
            let blocks = self.exports.blocks.as_ref();
            if blocks.is_some_and(|blocks| blocks.read(file, request.offset, bytes)) {
                self.counters.hits += 1;
                return Some(self.finish(&operation, Ok(()), buf));
            }
        }
        if command == Command::Flush && self.exports.has_sync_failed(file) {
            return Some(self.finish(&operation, Err(NbdError::Io), buf));
        }
        self.submit(operation, buf)
    }

    fn count(&mut self, command: Command, len: u32) {
        let counters = &mut self.counters;
        match command {
            Command::Read { .. } => {
                counters.reads += 1;
                counters.read_bytes += u64::from(len);
            }
            Command::Write { .. } => {
                counters.writes += 1;
                counters.written_bytes += u64::from(len);
            }
            Command::Flush => counters.flushes += 1,
            _ => counters.other += 1,
        }
    }

    /// Has the engine bring back a number that nobody gave it.
    #[cfg(test)]
    pub(crate) fn forge(&self, token: u64, buf: AlignedBuf) {
        let read = self.engine.read(&self.files[0], buf, 0);
        read.enqueue(&self.transfers, token).expect("the engine has room");
    }

    /// What the table of operations consists of.
    pub(crate) fn table(&self) -> TableStats {
        self.operations.stats()
    }

    /// What waits and waited for the engine.
    pub(crate) fn waits(&self) -> WaitStats {
        self.waiting.stats()
    }

    /// Hands an operation to the engine, or has it wait for a place there.
    fn submit(&mut self, operation: Operation, buf: Option<AlignedBuf>) -> Option<Step> {
        if self.in_engine < self.depth && self.waiting.is_empty() {
            return self.enqueue(operation, buf).map(|(_, step)| step);
        }
        let (export, class) = (operation.export, operation.class());
        let (operation, buf) = self.waiting.push(export, class, (operation, buf)).err()?;
        Some(self.finish(&operation, Err(NbdError::NoMem), buf))
    }

    /// Hands what waits to the engine, as far as there are places.
    fn admit(&mut self) {
        while self.in_engine < self.depth {
            let Some((operation, buf)) = self.waiting.pop() else { return };
            let answered = self.enqueue(operation, buf);
            self.answered.extend(answered);
        }
    }

    /// Drops what a closed connection has waiting, but for requests that were begun; `give` gets the
    /// buffers.
    pub(crate) fn abandon(&mut self, conn: Id, mut give: impl FnMut(AlignedBuf)) {
        self.waiting.drop_if(
            |(operation, _)| !operation.begun && CtxRef::id(&operation.conn) == conn,
            |(_, buf)| buf.into_iter().for_each(&mut give),
        );
    }

    /// Hands an operation to the engine, under an id. If that cannot be it comes back with its reply.
    fn enqueue(
        &mut self,
        operation: Operation,
        buf: Option<AlignedBuf>,
    ) -> Option<(Operation, Step)> {
        let Operation { file: number, stage, request: Request { offset, len, .. }, .. } = operation;
        let id = match self.operations.insert(operation) {
            Ok(id) => id,
            Err(InsertError { value, reason, .. }) => {
                // There is room for `most`: what can refuse is memory.
                let step = self.finish(&value, Err(NbdError::from_errno(reason.errno())), buf);
                return Some((value, step));
            }
        };
        self.in_engine += 1;
        let (engine, file, token) = (&self.engine, &self.files[number], id.to_bits());
        let len = u64::from(len);
        let refused = match (stage, buf) {
            (Stage::Read, Some(buf)) => {
                match self.exports.fill(number, offset, buf, &mut self.loads) {
                    Ok(fill) => {
                        let start = fill.offset();
                        let read = engine.read(file, fill, start).enqueue(&self.fills, token);
                        read.err().map(|error| {
                            let reason = io::Error::from_raw_os_error(error.errno());
                            (reason, Some(error.into_request().into_buf().cancel()))
                        })
                    }
                    Err(buf) => {
                        let read = engine.read(file, buf, offset).enqueue(&self.transfers, token);
                        read.err().map(with_buf)
                    }
                }
            }
            (Stage::Write { .. }, Some(buf)) => {
                engine.write(file, buf, offset).enqueue(&self.transfers, token).err().map(with_buf)
            }
            (Stage::Zeros { done, .. }, _) => {
                let run = &zeros()[..ZEROS.min((len - done) as usize)];
                let write = engine.write(file, run, offset + done);
                write.enqueue(&self.zeros, token).err().map(|error| (error.into(), None))
            }
            (stage, _) => {
                let request = match stage {
                    Stage::Punch { .. } => {
                        engine.allocate(file, AllocateMode::PunchHole, offset, len)
                    }
                    Stage::ZeroRange { .. } => {
                        engine.allocate(file, AllocateMode::ZeroRange, offset, len)
                    }
                    Stage::Advise => engine.will_need(file, offset, len),
                    _ => engine.fdatasync(file),
                };
                request.enqueue(&self.others, token).err().map(|error| (error.into(), None))
            }
        };
        // The engine has room for `depth` requests and `check` saw to the alignment: what can
        // refuse is an engine shut down.
        let (error, buf): (io::Error, _) = refused?;
        let operation = self.retire(token).ok()?;
        let step = self.finish(&operation, Err(NbdError::from(&error)), buf);
        Some((operation, step))
    }

    /// The operation of an id that the engine brought back. It has that id no more.
    fn retire(&mut self, token: u64) -> Result<Operation, LookupError> {
        let id = Id::from_bits(token).ok_or(LookupError::NotFound)?;
        let operation = self.operations.with(id, Operation::clone)?;
        self.operations.remove(id)?;
        self.in_engine -= 1;
        Ok(operation)
    }

    /// Takes the next completion and goes on with its request; `None` when there are none.
    ///
    /// With the slot of the connection that the step is for.
    pub(crate) fn complete(&mut self) -> Option<Result<(usize, Step), Stray>> {
        if let Some((Operation { conn, .. }, step)) = self.answered.pop_front() {
            return Some(self.address((conn.slot(), CtxRef::is_removed(&conn)), step));
        }
        if let Some((conn, step)) = self.maps.pop(&mut self.counters) {
            return Some(self.address((conn.slot(), CtxRef::is_removed(&conn)), step));
        }
        if let Some(ended) = self.forgotten() {
            return Some(self.conclude(ended));
        }
        loop {
            let resolved = if let Some(done) = self.fills.pop() {
                let (result, buf, loads) = done.buf.finish(done.result);
                self.loads.push(loads);
                self.resolve(done.token, result, Some(buf))
            } else if let Some(done) = self.transfers.pop() {
                self.resolve(done.token, done.result, Some(done.buf))
            } else if let Some(done) = self.zeros.pop() {
                self.resolve(done.token, done.result, None)
            } else {
                let done = self.others.pop()?;
                self.resolve(done.token, done.result, None)
            };
            if resolved.is_some() {
                return resolved;
            }
        }
    }

    /// What becomes of a completion; `None` while the cache has yet to forget what it changed.
    fn resolve(
        &mut self,
        token: u64,
        result: io::Result<usize>,
        buf: Option<AlignedBuf>,
    ) -> Option<Result<(usize, Step), Stray>> {
        let operation = match self.retire(token) {
            Ok(operation) => operation,
            Err(error) => {
                self.counters.unknown += 1;
                if is_logged(self.counters.unknown) {
                    warn!(token, %error, "a completion of nothing");
                }
                return Some(Err(Stray { why: Lost::Unknown(error), buf }));
            }
        };
        let Operation { file, request, .. } = operation;
        let ended = Ended { operation, result, buf };
        if let (true, Some(blocks)) =
            (ended.operation.has_changed(&ended.result), &self.exports.blocks)
        {
            if let Some(mut left) = blocks.forget(file, request.offset, request.len.into()) {
                if !has_forgotten(&self.exports, file, &mut left, &self.waker) {
                    self.forgetting.push((ended, left));
                    self.admit(); // there is a place
                    return None;
                }
            }
        }
        Some(self.conclude(ended))
    }

    /// An operation whose change is forgotten by now.
    fn forgotten(&mut self) -> Option<Ended> {
        let Self { forgetting, exports, waker, .. } = self;
        let at = forgetting
            .iter_mut()
            .position(|(ended, left)| has_forgotten(exports, ended.operation.file, left, waker))?;
        Some(forgetting.swap_remove(at).0)
    }

    fn conclude(
        &mut self,
        Ended { operation, result, buf }: Ended,
    ) -> Result<(usize, Step), Stray> {
        let whose = (operation.conn.slot(), CtxRef::is_removed(&operation.conn));
        let step = self.advance(operation, result, buf);
        self.admit(); // there is a place
        self.address(whose, step)
    }

    /// A step with the slot of the connection that it is for, unless that is closed.
    fn address(
        &mut self,
        (slot, closed): (usize, bool),
        step: Step,
    ) -> Result<(usize, Step), Stray> {
        if closed {
            // What was begun for it is done to the end all the same; nobody hears of it.
            self.counters.closed += 1;
            return Err(Stray { why: Lost::Closed, buf: step.data.or(step.spent) });
        }
        Ok((slot, step))
    }

    fn advance(
        &mut self,
        mut operation: Operation,
        result: io::Result<usize>,
        buf: Option<AlignedBuf>,
    ) -> Step {
        if operation.stage == Stage::Sync {
            if result.is_err() {
                self.exports.sync_failed(operation.file);
            } else if self.exports.has_sync_failed(operation.file) {
                // Another one failed while this one was on its way: it heard of that, and this did not.
                return self.finish(&operation, Err(NbdError::Io), buf);
            }
        }
        match operation.then(&result) {
            Then::Next(stage) => {
                (operation.stage, operation.begun) = (stage, true);
                if stage == Stage::Sync && self.exports.has_sync_failed(operation.file) {
                    return self.finish(&operation, Err(NbdError::Io), buf);
                }
                let on_its_way = Step { header: None, data: None, spent: None };
                Step { spent: buf, ..self.submit(operation, None).unwrap_or(on_its_way) }
            }
            Then::Reply(reply) => {
                // NotSup is an answer, not a failure.
                if let (Err(error), false) = (&result, reply == Err(NbdError::NotSup)) {
                    self.counters.failures += 1;
                    let failures = self.counters.failures;
                    if is_logged(failures) {
                        let Request { command, offset, len, .. } = operation.request;
                        warn!(command, offset, len, failures, %error, "the image failed a request");
                    }
                }
                self.finish(&operation, reply, buf)
            }
        }
    }

    fn finish(
        &mut self,
        operation: &Operation,
        result: Result<(), NbdError>,
        buf: Option<AlignedBuf>,
    ) -> Step {
        self.counters.errors += u64::from(result.is_err());
        operation.reply(result, buf)
    }
}

/// Whether the cache has forgotten all; if not, the waker is called when it may have.
fn has_forgotten(
    exports: &ExportTable,
    file: usize,
    left: &mut Invalidation,
    waker: &Waker,
) -> bool {
    match (Pin::new(left).poll(&mut Context::from_waker(waker)), &exports.blocks) {
        (Poll::Pending, _) => false,
        (Poll::Ready(Err(error)), Some(blocks)) => {
            blocks.give_up(file, error);
            true
        }
        (Poll::Ready(_), _) => true,
    }
}

/// A refused transfer's buffer, beside the reason.
fn with_buf(
    error: SubmitError<aio_reap::Request<'_, AlignedBuf>>,
) -> (io::Error, Option<AlignedBuf>) {
    let reason = io::Error::from_raw_os_error(error.errno());
    (reason, Some(error.into_request().into_buf()))
}
