//! Requests between their header and their reply: what to ask of the engine, and what next.
//!
//! ```text
//!  READ [─read─►] reply with data            TRIM ───────punch──► [fdatasync] ──► reply
//!  WRITE ─write─► [fdatasync if FUA] ► reply  WRITE_ZEROES ─punch─► or zero ─► or write zeros ─┘
//!  FLUSH ─fdatasync─► reply                   CACHE ─will-need─► reply
//!  BLOCK_STATUS ─hand─► reply with extents
//! ```
//!
//! So they do where nothing is kept in memory. Where an image is cached, most need no engine, and some a
//! [hand](crate::hands): see [`blocks`](crate::blocks).
//!
//! A request has at most one operation at a time, in the engine or waiting for a place there: see
//! [`admission`](crate::admission). The engine is given no more than it works on at a time, so it
//! refuses none. Each operation in it has an id of its own, which is all that the engine is told of
//! it: see [`contexts`](crate::contexts).

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use aio_reap::{AlignedBuf, AllocateMode, CompletionQueue, Engine, File, SubmitError};
use bufcache::Load;
use nbd_protocol::{Command, HeaderStyle, NbdError, Request};
use radix_ctx::{CtxRef, CtxTable, Id, InsertError, LookupError, TableStats};
use slab::Slab;
use tracing::warn;

use crate::admission::{Admission, WaitStats};
use crate::blocks::Fill;
use crate::changes::{Job, Outcome, Way, Work};
use crate::contexts::{Connection, Lost, Stray};
use crate::counters::{Counters, is_logged};
use crate::export::{Export, ExportTable};
use crate::extents;
use crate::hands::{self, Back, Done, Task};
use crate::memory::{ZEROS, zeros};
use crate::operation::{Operation, Stage, Step, Then, Zeroes};
use crate::places::Places;
use crate::syncs::Fate;

/// An operation that waits for a place in the engine, and its buffer.
type Waiting = (Operation, Option<AlignedBuf>);

/// How much a worker takes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Operations in the engine and in hands.
    pub(crate) depth: usize,
    /// Operations in all: those, and those that wait for a place there.
    pub(crate) most: usize,
}

/// An image's [share](crate::places) of that. A guess: alone it is given all of up to 8 places, and 114 of 128.
const SHARE: usize = 8;

/// A worker's requests in flight, and the engine that works on them.
pub(crate) struct Requests {
    pub(crate) engine: Rc<Engine>,
    /// By index of the export table's files, as far as they were asked for.
    files: Vec<File>,
    /// Those in the engine.
    operations: CtxTable<Operation>,
    /// There and in hands.
    places: Places,
    /// Operations in all: see [`Limits`].
    most: usize,
    /// If something waits, every place is taken that its image may have.
    waiting: Admission<Waiting>,
    /// What waited, and was answered without the engine.
    answered: VecDeque<(Operation, Step)>,
    /// Those that hands work on.
    handed: Slab<Operation>,
    back: Arc<Back>,
    /// Syncs that are over, and wait for others before that number.
    synced: Vec<(Operation, u64)>,
    /// Has [`complete`](Self::complete) called.
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
        limits: Limits,
        waker: Waker,
    ) -> io::Result<Self> {
        let operations = CtxTable::builder().max_contexts(limits.most as u64).build();
        let files = exports.files.iter().map(|file| engine.attach(file.try_clone()?));
        Ok(Self {
            files: files.collect::<io::Result<_>>()?,
            engine,
            operations: operations.map_err(io::Error::from)?,
            places: Places::new(limits.depth, SHARE, exports.capacity()),
            most: limits.most,
            waiting: Admission::new(exports.capacity())?,
            // With room for as many as there may be: these do not grow while requests are served.
            answered: VecDeque::with_capacity(limits.most),
            handed: Slab::with_capacity(limits.depth),
            back: Arc::new(Back::new(limits.depth, waker.clone())),
            synced: Vec::with_capacity(limits.most),
            waker,
            loads: Vec::with_capacity(limits.depth),
            fills: CompletionQueue::new(),
            transfers: CompletionQueue::new(),
            others: CompletionQueue::new(),
            zeros: CompletionQueue::new(),
            exports: Arc::clone(exports),
            counters: Counters::default(),
        })
    }

    /// Whether there is room for one more request to that export.
    pub(crate) fn has_room(&self, export: usize) -> bool {
        let its = || (self.exports.get(export).file, self.waiting.len_of(export));
        self.places.has_room(self.most, self.waiting.len() + self.synced.len(), its)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.places.taken() == 0
            && self.waiting.is_empty()
            && self.answered.is_empty()
            && !self.waits_for_others()
    }

    /// Whether something is waited for that the waker tells of.
    pub(crate) fn waits_for_others(&self) -> bool {
        !self.handed.is_empty() || !self.synced.is_empty()
    }

    /// Whether [`complete`](Self::complete) has nothing to return.
    pub(crate) fn nothing_completed(&self) -> bool {
        self.answered.is_empty()
            && self.fills.is_empty()
            && self.transfers.is_empty()
            && self.others.is_empty()
            && self.zeros.is_empty()
            && (self.handed.is_empty() || self.back.is_empty())
    }

    /// Carries out a request, or at least begins to. `Some` if the reply is there already.
    ///
    /// `buf` is a READ's or BLOCK_STATUS's buffer, or a WRITE's data.
    pub(crate) fn start(
        &mut self,
        conn: &CtxRef<Connection>,
        (export, style): (usize, HeaderStyle),
        mut request: Request,
        command: Command,
        mut buf: Option<AlignedBuf>,
    ) -> Option<Step> {
        self.count(command, request.len);
        let stage = match command {
            Command::BlockStatus { .. } => Stage::Map,
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
        let Export { file, start, .. } = *self.exports.get(export);
        request.offset += start; // in the file from here to the reply; the export ends inside it
        let mut work = None;
        if let Command::BlockStatus { one } = command {
            work = Some(Work::Map { one });
        }
        // An answer that is there at once needs no operation, nor a reference to its connection.
        let answer = if let Err(error) = self.attach(file) {
            Some(self.judge(&request, Err(error)))
        } else if request.len == 0 && command != Command::Flush {
            // fallocate refuses an empty range, and nothing else has anything to do.
            Some(Ok(()))
        } else if stage == Stage::Map {
            None
        } else {
            if let (Stage::Read, Some(bytes)) = (stage, &mut buf) {
                bytes.set_len(request.len as usize); // of its room, which may be more
            }
            let bytes = buf.as_deref_mut().unwrap_or_default();
            let blocks = self.exports.blocks.as_ref();
            match blocks.map_or(Way::Engine, |blocks| blocks.begin(file, command, &request, bytes))
            {
                Way::Answer(result) => {
                    self.counters.hits += u64::from(stage == Stage::Read);
                    Some(self.judge(&request, result))
                }
                Way::Hand(for_a_hand) => {
                    work = Some(for_a_hand);
                    None
                }
                Way::Engine => None,
            }
        };
        let sync_failed = || command == Command::Flush && self.exports.has_sync_failed(file);
        if let Some(result) = answer.or_else(|| sync_failed().then_some(Err(NbdError::Io))) {
            self.counters.errors += u64::from(result.is_err());
            return Some(Step::reply(&request, start, style, stage, result, buf));
        }
        let conn = conn.clone();
        let operation = Operation {
            conn,
            export,
            file,
            start,
            style,
            begun: false,
            request,
            stage,
            sync: 0,
            work,
        };
        self.submit(operation, buf)
    }

    /// Tells the engine of a file, and of those before it.
    fn attach(&mut self, file: usize) -> io::Result<()> {
        while self.files.len() <= file {
            let next = self.exports.files[self.files.len()].try_clone()?;
            self.files.push(self.engine.attach(next)?);
        }
        Ok(())
    }

    fn count(&mut self, command: Command, len: u64) {
        let counters = &mut self.counters;
        match command {
            Command::Read { .. } => {
                counters.reads += 1;
                counters.read_bytes += len;
            }
            Command::Write { .. } => {
                counters.writes += 1;
                counters.written_bytes += len;
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

    /// Has a hand work on a request. If that cannot be it comes back with its reply.
    fn hand(
        &mut self,
        operation: Operation,
        work: Work,
        buf: Option<AlignedBuf>,
    ) -> Option<(Operation, Step)> {
        let Operation { export, file, request: Request { offset, len, .. }, .. } = operation;
        let exports = Arc::clone(&self.exports);
        let job = if let Work::Map { one } = work {
            let style = operation.style;
            hands::Job::Map(extents::Job { exports, export, one, style, offset, len })
        } else {
            let image = Arc::clone(exports.blocks.as_ref()?.image(file)?); // which has said so
            hands::Job::Image(Job { image, work, offset, len })
        };
        let class = operation.class();
        let key = self.handed.insert(operation);
        self.places.take(file);
        let task = Task { job, buf, key, back: Arc::clone(&self.back) };
        let Err(task) = self.exports.hands.give(file, class, task) else { return None };
        let operation = self.handed.remove(key);
        self.places.leave(file);
        let step = self.finish(&operation, Err(NbdError::NoMem), task.buf);
        Some((operation, step))
    }

    /// What a hand brings back; `None` if the request goes on.
    fn handed_back(
        &mut self,
        Done { key, result, buf }: Done,
    ) -> Option<Result<(usize, Step), Stray>> {
        let mut operation = self.handed.remove(key);
        self.places.leave(operation.file);
        let whose = (operation.conn.slot(), CtxRef::is_removed(&operation.conn));
        let step = match result {
            Ok(Outcome::Settled) if !whose.1 => {
                operation.work = None;
                self.submit(operation, buf)
            }
            result => {
                let result = self.judge(&operation.request, result.map(drop));
                Some(self.finish(&operation, result, buf))
            }
        };
        self.admit(); // there is a place, and this operation may not be the one that may have it
        Some(self.address(whose, step?))
    }

    /// What the client hears of it, and the log.
    fn judge(&mut self, request: &Request, result: io::Result<()>) -> Result<(), NbdError> {
        result.map_err(|error| {
            // An answer, not a failure.
            if error.raw_os_error() == Some(libc::EOPNOTSUPP) {
                return NbdError::NotSup;
            }
            self.log(request, &error);
            NbdError::from(&error)
        })
    }

    fn log(&mut self, request: &Request, error: &io::Error) {
        self.counters.failures += 1;
        let failures = self.counters.failures;
        if is_logged(failures) {
            let Request { command, offset, len, .. } = *request;
            warn!(command, offset, len, failures, %error, "the image failed a request");
        }
    }

    /// Hands an operation to the engine or to a hand, or has it wait for a place there.
    fn submit(&mut self, operation: Operation, buf: Option<AlignedBuf>) -> Option<Step> {
        let has_place = self.places.may(operation.file);
        if has_place && self.waiting.is_empty() {
            return self.enqueue(operation, buf).map(|(_, step)| step);
        }
        let (export, class) = (operation.export, operation.class());
        if let Err((operation, buf)) = self.waiting.push(export, class, (operation, buf)) {
            return Some(self.finish(&operation, Err(NbdError::NoMem), buf));
        }
        if has_place {
            self.admit(); // those that wait may not have it, or are as urgent
        }
        None
    }

    /// Hands on what waits, as far as there are places.
    fn admit(&mut self) {
        loop {
            let Self { waiting, exports, places, .. } = self;
            let next = waiting.pop_if(|export| places.may(exports.get(export).file));
            let Some((_, (operation, buf))) = next else { return };
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
        mut operation: Operation,
        buf: Option<AlignedBuf>,
    ) -> Option<(Operation, Step)> {
        if let Some(work) = operation.work {
            return self.hand(operation, work, buf);
        }
        let Operation { file: number, stage, request: Request { offset, len, .. }, .. } = operation;
        if stage == Stage::Sync {
            operation.sync = self.exports.syncs(number).begin();
        }
        let id = match self.operations.insert(operation) {
            Ok(id) => id,
            Err(InsertError { value, reason, .. }) => {
                self.never_asked(&value);
                // There is room for `most`: what can refuse is memory.
                let step = self.finish(&value, Err(NbdError::from_errno(reason.errno())), buf);
                return Some((value, step));
            }
        };
        self.places.take(number);
        let (engine, file, token) = (&self.engine, &self.files[number], id.to_bits());
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
            (Stage::Zeros { done, .. }, _) => match zeros() {
                Some(zeros) => {
                    let run = &zeros[..ZEROS.min((len - done) as usize)];
                    let write = engine.write(file, run, offset + done);
                    write.enqueue(&self.zeros, token).err().map(|error| (error.into(), None))
                }
                None => Some((io::Error::from_raw_os_error(libc::ENOMEM), None)),
            },
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
        self.never_asked(&operation);
        let step = self.finish(&operation, Err(NbdError::from(&error)), buf);
        Some((operation, step))
    }

    /// Nobody need wait for a sync that the kernel has not heard of.
    fn never_asked(&self, operation: &Operation) {
        if operation.stage == Stage::Sync {
            self.exports.syncs(operation.file).over(operation.sync, false);
        }
    }

    /// The operation of an id that the engine brought back. It has that id no more.
    fn retire(&mut self, token: u64) -> Result<Operation, LookupError> {
        let id = Id::from_bits(token).ok_or(LookupError::NotFound)?;
        let operation = self.operations.with(id, Operation::clone)?;
        self.operations.remove(id)?;
        self.places.leave(operation.file);
        Ok(operation)
    }

    /// Takes the next completion and goes on with its request; `None` when there are none.
    ///
    /// With the slot of the connection that the step is for.
    pub(crate) fn complete(&mut self) -> Option<Result<(usize, Step), Stray>> {
        if let Some((Operation { conn, .. }, step)) = self.answered.pop_front() {
            return Some(self.address((conn.slot(), CtxRef::is_removed(&conn)), step));
        }
        if let Some((operation, result)) = self.next_synced() {
            let step = self.finish(&operation, result, None);
            let Operation { conn, .. } = operation;
            return Some(self.address((conn.slot(), CtxRef::is_removed(&conn)), step));
        }
        while let Some(done) = (!self.handed.is_empty()).then(|| self.back.pop()).flatten() {
            let resolved = self.handed_back(done);
            if resolved.is_some() {
                return resolved;
            }
        }
        Some(if let Some(done) = self.fills.pop() {
            let (result, buf, loads) = done.buf.finish(done.result);
            self.loads.push(loads);
            self.resolve(done.token, result, Some(buf))
        } else if let Some(done) = self.transfers.pop() {
            self.resolve(done.token, done.result.map_err(Into::into), Some(done.buf))
        } else if let Some(done) = self.zeros.pop() {
            self.resolve(done.token, done.result.map_err(Into::into), None)
        } else {
            let done = self.others.pop()?;
            self.resolve(done.token, done.result.map_err(Into::into), None)
        })
    }

    /// A sync that had to wait for others, and what became of it.
    fn next_synced(&mut self) -> Option<(Operation, Result<(), NbdError>)> {
        let Self { synced, exports, waker, .. } = self;
        let (at, result) = synced.iter().enumerate().find_map(|(at, (operation, before))| {
            match exports.syncs(operation.file).look(*before, waker) {
                Fate::Durable => Some((at, Ok(()))),
                Fate::Lost => Some((at, Err(NbdError::Io))),
                Fate::After(_) => None,
            }
        })?;
        Some((synced.swap_remove(at).0, result))
    }

    fn resolve(
        &mut self,
        token: u64,
        result: io::Result<usize>,
        buf: Option<AlignedBuf>,
    ) -> Result<(usize, Step), Stray> {
        let operation = match self.retire(token) {
            Ok(operation) => operation,
            Err(error) => {
                self.counters.unknown += 1;
                if is_logged(self.counters.unknown) {
                    warn!(token, %error, "a completion of nothing");
                }
                return Err(Stray { why: Lost::Unknown(error), buf });
            }
        };
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
            match self.exports.syncs(operation.file).over(operation.sync, result.is_err()) {
                // Another one failed: who asked for that heard of it, and this one did not.
                Fate::Lost if result.is_ok() => {
                    return self.finish(&operation, Err(NbdError::Io), buf);
                }
                Fate::After(before) => {
                    self.synced.push((operation, before));
                    return Step { header: None, data: None, spent: buf };
                }
                _ => {}
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
                    self.log(&operation.request, error);
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

/// A refused transfer's buffer, beside the reason.
fn with_buf(
    error: SubmitError<aio_reap::Request<'_, AlignedBuf>>,
) -> (io::Error, Option<AlignedBuf>) {
    let reason = io::Error::from_raw_os_error(error.errno());
    (reason, Some(error.into_request().into_buf()))
}
