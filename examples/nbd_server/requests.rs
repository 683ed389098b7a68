//! The requests of one worker: answered from memory, run as futures within a limit, or queued.
//!
//! ```text
//!  start ─► answered from memory ────────────────────────────────────────► reply
//!      └─► below the limits? ─yes─► a future (commands, tasks) ─► its end ─► reply
//!                └─no─► a queue (admission) ─────┘ ◄── another ends ──┘
//! ```
//!
//! A blocking operation ([`Operation::is_blocking`]) occupies one of the cache's few threads,
//! perhaps for long. So only a few blocking operations may run or wait among the others, and READs
//! find slots free; the blocking operations beyond them wait in a queue of their own.
//!
//! A request that has begun continues to its end, also if its connection is closed meanwhile. A
//! queued request is dropped then.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use aio_reap::{AlignedBuf, Engine, File};
use nbd_protocol::{Command, HeaderStyle, NbdError, Request};
use radix_ctx::{CtxRef, Id};
use tracing::warn;

use crate::admission::{Admission, WaitStats};
use crate::blocks::{Source, of_get};
use crate::commands::Job;
use crate::contexts::Connection;
use crate::counters::{Counters, is_logged};
use crate::export::{Export, ExportTable};
use crate::memory::ALIGN;
use crate::operation::{Ended, Operation, Step};
use crate::quota::FileQuotas;
use crate::tasks::{self, Panicked, Tasks};

/// A queued operation, and its buffer.
type Waiting = (Operation, Option<AlignedBuf>);

/// The limits of a worker's requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Operations that run.
    pub(crate) depth: usize,
    /// Operations that run or are queued.
    pub(crate) most: usize,
}

/// An image's [share](crate::quota) of a limit. A guess: an image alone may use all of a limit up
/// to 8, and 114 of 128.
const SHARE: usize = 8;

/// Most blocking operations that run or wait among the others. A guess: as many as an image has
/// threads of the cache. Where the depth is small it is half of the depth, but at least 4.
const MAX_BLOCKING: usize = 16;

/// A worker's requests in flight, and the engine that works on them.
pub(crate) struct Requests {
    pub(crate) engine: Rc<Engine>,
    /// By index of the export table's files, as far as they were asked for.
    sources: Vec<Source<File>>,
    tasks: Tasks<Ended>,
    /// Running operations by file.
    running: FileQuotas,
    /// Operations in all: see [`Limits`].
    most: usize,
    /// An operation is here only while its image may not run one more.
    waiting: Admission<Waiting>,
    /// Blocking operations that run or are in `waiting`, by file.
    blocking: FileQuotas,
    /// Blocking operations beyond them.
    excess_blocking: Admission<Waiting>,
    /// Queued operations that ended as soon as they began.
    ended: VecDeque<Ended>,
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
        let mut requests = Self {
            engine,
            sources: Vec::new(),
            tasks: Tasks::new(limits.depth, waker),
            running: FileQuotas::new(limits.depth, SHARE, exports.capacity()),
            most: limits.most,
            waiting: Admission::new(exports.capacity())?,
            blocking: FileQuotas::new(
                (limits.depth / 2).clamp(4, MAX_BLOCKING),
                SHARE,
                exports.capacity(),
            ),
            excess_blocking: Admission::new(exports.capacity())?,
            // With room for as many as there may be: it does not grow while requests are served.
            ended: VecDeque::with_capacity(limits.most),
            exports: Arc::clone(exports),
            counters: Counters::default(),
        };
        exports.blocks.count().checked_sub(1).map_or(Ok(()), |last| requests.attach(last))?;
        Ok(requests)
    }

    /// Whether one more request of that export may run or queue.
    pub(crate) fn has_room(&self, export: usize) -> bool {
        let Self { waiting, excess_blocking, .. } = self;
        let its = || {
            (self.exports.get(export).file, waiting.len_of(export) + excess_blocking.len_of(export))
        };
        self.running.may_queue(self.most, waiting.len() + excess_blocking.len(), its)
    }

    pub(crate) fn is_idle(&self) -> bool {
        let waits = !self.waiting.is_empty() || !self.excess_blocking.is_empty();
        self.tasks.len() == 0 && !waits && self.ended.is_empty()
    }

    /// Whether [`complete`](Self::complete) has nothing to return.
    pub(crate) fn nothing_completed(&self) -> bool {
        self.ended.is_empty() && !self.tasks.is_ready()
    }

    /// Operations that have begun and not ended.
    #[cfg(test)]
    pub(crate) fn begun(&self) -> usize {
        self.tasks.len()
    }

    /// Files that have operations which have begun, and how many.
    pub(crate) fn begun_by_file(&self) -> impl Iterator<Item = (usize, usize)> {
        self.running.in_flight()
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
        let Export { file, start, .. } = *self.exports.get(export);
        request.offset += start; // in the file from here to the reply; the export ends inside it
        let mut written = 0;
        // An answer that is there at once needs no operation, nor a reference to its connection.
        if let Some(result) = self.answer(file, command, &request, &mut buf, &mut written) {
            let result = self.judge(&request, result);
            return Some(Step::reply((&request, command), start, style, result, buf));
        }
        let conn = conn.clone();
        let operation = Operation { conn, export, file, start, style, request, command, written };
        let (class, is_blocking) = (operation.class(), operation.is_blocking());
        let is_excess =
            is_blocking && !(self.excess_blocking.is_empty() && self.blocking.allows(file));
        if is_blocking && !is_excess {
            self.blocking.acquire(file);
        }
        if !is_excess && self.waiting.is_empty() && self.running.allows(file) {
            return self.begin(operation, buf).map(|ended| self.end(ended));
        }
        let queue = if is_excess { &mut self.excess_blocking } else { &mut self.waiting };
        if let Err(refused) = queue.push(export, class, (operation, buf)) {
            if is_blocking && !is_excess {
                self.blocking.release(file);
            }
            return Some(self.end(no_memory(refused)));
        }
        if is_excess || self.running.allows(file) {
            self.admit(); // those that wait may not run, or are as urgent
        }
        None
    }

    /// The result of a request that needs no wait. Otherwise `written` bytes of a WRITE may be in
    /// the cache.
    fn answer(
        &mut self,
        file: usize,
        command: Command,
        request: &Request,
        buf: &mut Option<AlignedBuf>,
        written: &mut usize,
    ) -> Option<io::Result<()>> {
        if let Err(error) = self.attach(file) {
            return Some(Err(error));
        }
        let Request { offset, len, .. } = *request;
        if len == 0 && command != Command::Flush {
            return Some(Ok(())); // fallocate refuses an empty range, and nothing else has anything to do
        }
        let image = self.exports.image(file);
        match (command, buf) {
            (Command::Read { .. }, Some(buf)) => {
                buf.set_len(len as usize); // of its room, which may be more
                let hit = image.try_read(offset, buf);
                self.counters.hits += u64::from(hit);
                hit.then_some(Ok(()))
            }
            (Command::Write { fua }, Some(buf)) if !image.passes_by(len, true) => {
                match image.try_write(offset, buf) {
                    Ok(done) if done == buf.len() && !fua => Some(Ok(())),
                    Ok(done) => {
                        *written = done;
                        None
                    }
                    Err(error) => Some(Err(of_get(error))),
                }
            }
            _ => None,
        }
    }

    /// Tells the engine of a file, and of those before it.
    fn attach(&mut self, file: usize) -> io::Result<()> {
        while self.sources.len() <= file {
            let image = self.exports.image(self.sources.len());
            self.sources.push(image.source.attach(&self.engine)?);
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

    /// The waits of both queues. An operation that was in both counts twice.
    pub(crate) fn waits(&self) -> WaitStats {
        let mut stats = self.waiting.stats();
        stats.add(&self.excess_blocking.stats());
        stats
    }

    /// What the client is told of a result, and the log.
    fn judge(&mut self, request: &Request, result: io::Result<()>) -> Result<(), NbdError> {
        result.map_err(|error| {
            self.counters.errors += 1;
            // An answer, not a failure.
            if error.raw_os_error() == Some(libc::EOPNOTSUPP) {
                return NbdError::NotSup;
            }
            self.counters.failures += 1;
            let failures = self.counters.failures;
            if is_logged(failures) {
                let Request { command, offset, len, .. } = *request;
                warn!(command, offset, len, failures, %error, "the image failed a request");
            }
            NbdError::from(&error)
        })
    }

    /// Runs an operation that the limits allow. It may end at once.
    fn begin(&mut self, operation: Operation, buf: Option<AlignedBuf>) -> Option<Ended> {
        let Operation { export, file, style, request, command, written, .. } = operation;
        let job = Job {
            engine: Rc::clone(&self.engine),
            source: self.sources[file].clone(),
            image: Arc::clone(self.exports.image(file)),
            unit: self.exports.get(export).info.min_block.max(1).into(),
            style,
            command,
            request,
            written,
        };
        self.running.acquire(file);
        let size = buf.as_ref().map(AlignedBuf::capacity);
        let ended = self.tasks.spawn(async move {
            let (result, buf) = tasks::contain(job.run(buf)).await.unwrap_or_else(|Panicked| {
                // The panic dropped the buffer, or the engine has it. The account is credited for
                // one of its size.
                let buf = size.and_then(|size| AlignedBuf::try_zeroed(size, ALIGN));
                (Err(io::Error::from_raw_os_error(libc::EIO)), buf)
            });
            Ended { operation, result, buf }
        })?;
        self.leave(&ended.operation);
        Some(ended)
    }

    /// An operation that had begun has ended.
    fn leave(&mut self, operation: &Operation) {
        self.running.release(operation.file);
        if operation.is_blocking() {
            self.blocking.release(operation.file);
        }
    }

    /// The reply of an operation that has ended.
    fn end(&mut self, Ended { operation, result, buf }: Ended) -> Step {
        let Operation { ref request, command, start, style, .. } = operation;
        let result = self.judge(request, result);
        Step::reply((request, command), start, style, result, buf)
    }

    /// Runs queued operations, as far as the limits allow.
    fn admit(&mut self) {
        loop {
            let Self { waiting, exports, running, blocking, excess_blocking, .. } = self;
            let may = |export| blocking.allows(exports.get(export).file);
            if let Some((export, (operation, buf))) = excess_blocking.pop_if(may) {
                let (file, class) = (operation.file, operation.class());
                match waiting.push(export, class, (operation, buf)) {
                    Ok(()) => blocking.acquire(file),
                    Err(refused) => self.ended.push_back(no_memory(refused)),
                }
                continue;
            }
            let next = waiting.pop_if(|export| running.allows(exports.get(export).file));
            let Some((_, (operation, buf))) = next else { return };
            let ended = self.begin(operation, buf);
            self.ended.extend(ended);
        }
    }

    /// Drops what a closed connection has waiting; `give` gets the buffers.
    pub(crate) fn abandon(&mut self, conn: Id, mut give: impl FnMut(AlignedBuf)) {
        let Self { waiting, blocking, excess_blocking, .. } = self;
        let is_its = |(operation, _): &Waiting| CtxRef::id(&operation.conn) == conn;
        excess_blocking.drop_if(is_its, |(_, buf)| buf.into_iter().for_each(&mut give));
        waiting.drop_if(is_its, |(operation, buf)| {
            if operation.is_blocking() {
                blocking.release(operation.file);
            }
            buf.into_iter().for_each(&mut give);
        });
        self.admit(); // blocking operations of other connections
    }

    /// Goes on with what has completed, up to the next operation that ends; `None` when there is
    /// none.
    ///
    /// With the slot of the connection that the step is for. If the connection is closed, the
    /// buffer comes back.
    pub(crate) fn complete(&mut self) -> Option<Result<(usize, Step), Option<AlignedBuf>>> {
        let ended = self.ended.pop_front().or_else(|| {
            let ended = self.tasks.next()?;
            self.leave(&ended.operation);
            self.admit(); // a slot is free
            Some(ended)
        })?;
        let conn = &ended.operation.conn;
        let slot = *conn.slot.get().expect("its worker set it before its first request");
        let closed = CtxRef::is_removed(conn);
        let step = self.end(ended);
        if closed {
            // The request was carried out all the same.
            self.counters.closed += 1;
            return Some(Err(step.data.or(step.spent)));
        }
        Some(Ok((slot, step)))
    }
}

/// The end of an operation that cannot wait.
fn no_memory((operation, buf): Waiting) -> Ended {
    Ended { operation, result: Err(io::Error::from_raw_os_error(libc::ENOMEM)), buf }
}
