//! The requests of one worker: answered from memory, run as futures within a limit, or queued.
//!
//! ```text
//!  start ─► answered from memory ────────────────────────────────────────► reply
//!      └─► below the limit? ─yes─► a future (commands, tasks) ─► its end ─► reply
//!                └─no─► a queue (admission) ─────┘ ◄── another ends ──┘
//! ```
//!
//! A blocking operation ([`Operation::is_blocking`]) occupies one of the cache's few threads,
//! perhaps for long. So only a few blocking operations may run or wait among the others, and READs
//! find places free; the blocking operations beyond them wait in a queue of their own.
//!
//! A request that has begun continues to its end, also if its connection is closed meanwhile. A
//! queued request is dropped then.

use std::collections::VecDeque;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Waker;

use aio_reap::{AlignedBuf, Engine};
use nbd_protocol::{Command, NbdError, Request};
use radix_ctx::{CtxRef, Id};
use tracing::warn;

use crate::admission::{Admission, WaitStats, may_queue};
use crate::blocks::{Image, of_get};
use crate::commands::Job;
use crate::contexts::Connection;
use crate::counters::{Counters, is_logged};
use crate::memory::ALIGN;
use crate::operation::{Ended, Operation, Step, Target, Waiting, WorkerImage};
use crate::tasks::{self, Panicked, Tasks};

/// The limits of a worker's requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Operations that run.
    pub(crate) depth: usize,
    /// Operations that run or are queued.
    pub(crate) most: usize,
}

/// Most blocking operations that run or wait among the others. A guess: as many as an image has
/// threads of the cache. Where the depth is small it is half of the depth, but at least 4.
const MAX_BLOCKING: usize = 16;

/// A worker's requests in flight, and the engine that works on them.
pub(crate) struct Requests {
    pub(crate) engine: Rc<Engine>,
    /// Those that connections of the worker have open, or operations use.
    images: Vec<Weak<WorkerImage>>,
    tasks: Tasks<Ended>,
    /// Operations in all: see [`Limits`].
    most: usize,
    admission: Admission<Waiting>,
    /// Admits blocking operations to the other one.
    blocking: Admission<Waiting>,
    /// Queued operations that ended as soon as they began.
    ended: VecDeque<Ended>,
    pub(crate) counters: Counters,
}

impl Requests {
    /// Takes requests as the limits say. The waker is called, by any thread, when
    /// [`complete`](Self::complete) should be.
    pub(crate) fn new(engine: Rc<Engine>, Limits { depth, most }: Limits, waker: Waker) -> Self {
        Self {
            engine,
            images: Vec::new(),
            tasks: Tasks::new(depth, waker),
            most,
            admission: Admission::new(depth),
            blocking: Admission::new((depth / 2).clamp(4, MAX_BLOCKING)),
            // With room for as many as there may be: it does not grow while requests are served.
            ended: VecDeque::with_capacity(most),
            counters: Counters::default(),
        }
    }

    /// The image as this worker uses it, for a connection that opens it.
    pub(crate) fn open(&mut self, image: &Arc<Image>) -> io::Result<Rc<WorkerImage>> {
        self.images.retain(|known| known.strong_count() > 0);
        let mut known = self.images.iter().filter_map(Weak::upgrade);
        if let Some(known) = known.find(|known| Arc::ptr_eq(&known.image, image)) {
            return Ok(known);
        }
        let opened = WorkerImage::new(Arc::clone(image), image.source.attach(&self.engine)?)?;
        self.images.push(Rc::downgrade(&opened));
        Ok(opened)
    }

    /// Whether one more request of that image may run or queue.
    pub(crate) fn has_room(&self, WorkerImage { queue, blocking, .. }: &WorkerImage) -> bool {
        let used = self.admission.running() + self.admission.waiting() + self.blocking.waiting();
        may_queue(self.most, used, || queue.running() + queue.waiting() + blocking.waiting())
    }

    pub(crate) fn is_idle(&self) -> bool {
        let Self { admission, blocking, .. } = self;
        admission.running() + admission.waiting() + blocking.waiting() == 0 && self.ended.is_empty()
    }

    /// Whether [`complete`](Self::complete) has nothing to return.
    pub(crate) fn nothing_completed(&self) -> bool {
        self.ended.is_empty() && !self.tasks.is_ready()
    }

    /// Operations that have begun and not ended.
    #[cfg(test)]
    pub(crate) fn begun(&self) -> usize {
        self.admission.running()
    }

    /// Images that have operations which have begun, and how many.
    pub(crate) fn begun_by_image(&self) -> Vec<(String, usize)> {
        let images = self.images.iter().filter_map(Weak::upgrade);
        let begun = images.map(|its| (its.image.name.clone(), its.queue.running()));
        begun.filter(|&(_, count)| count > 0).collect()
    }

    /// Carries out a request, or at least begins to. `Some` if the reply is there already.
    ///
    /// `buf` is a READ's or BLOCK_STATUS's buffer, or a WRITE's data.
    pub(crate) fn start(
        &mut self,
        conn: &CtxRef<Connection>,
        target: &Target,
        mut request: Request,
        command: Command,
        mut buf: Option<AlignedBuf>,
    ) -> Option<Step> {
        self.count(command, request.len);
        request.offset += target.start; // in the image from here to the reply; the export ends inside it
        let mut written = 0;
        let image = &target.image;
        // An answer that is there at once needs no operation, nor a reference to its connection.
        if let Some(result) = self.answer(&image.image, command, &request, &mut buf, &mut written) {
            let result = self.judge(&request, result);
            return Some(Step::reply((&request, command), target, result, buf));
        }
        let operation =
            Operation { conn: conn.clone(), target: target.clone(), request, command, written };
        let is_excess = operation.is_blocking() && !self.blocking.begin(&image.blocking);
        if !is_excess && self.admission.begin(&image.queue) {
            return self.begin(operation, buf).map(|ended| self.end(ended));
        }
        if let Some(ended) = self.queue(is_excess, (operation, buf)) {
            return Some(self.end(ended));
        }
        self.admit(); // those that wait may not run
        None
    }

    /// The result of a request that needs no wait. Otherwise `written` bytes of a WRITE may be in
    /// the cache.
    fn answer(
        &mut self,
        image: &Image,
        command: Command,
        request: &Request,
        buf: &mut Option<AlignedBuf>,
        written: &mut usize,
    ) -> Option<io::Result<()>> {
        let Request { offset, len, .. } = *request;
        if len == 0 && command != Command::Flush {
            return Some(Ok(())); // fallocate refuses an empty range, and nothing else has anything to do
        }
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
        let mut stats = self.admission.stats();
        stats.add(&self.blocking.stats());
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

    /// Runs an operation that was admitted. It may end at once.
    fn begin(&mut self, operation: Operation, buf: Option<AlignedBuf>) -> Option<Ended> {
        let Operation { ref target, request, command, written, .. } = operation;
        let job = Job {
            engine: Rc::clone(&self.engine),
            source: target.image.source.clone(),
            image: Arc::clone(&target.image.image),
            unit: target.unit,
            style: target.style,
            command,
            request,
            written,
        };
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
        let image = &operation.target.image;
        self.admission.end(&image.queue);
        if operation.is_blocking() {
            self.blocking.end(&image.blocking);
        }
    }

    /// The reply of an operation that has ended.
    fn end(&mut self, Ended { operation, result, buf }: Ended) -> Step {
        let Operation { ref request, command, ref target, .. } = operation;
        let result = self.judge(request, result);
        Step::reply((request, command), target, result, buf)
    }

    /// Queues an operation, and a blocking one among those beyond the limit, if it `is_excess`. Returns
    /// it, ended, if there is no memory.
    fn queue(&mut self, is_excess: bool, waiting: Waiting) -> Option<Ended> {
        let image = Rc::clone(&waiting.0.target.image);
        let (class, is_blocking) = (waiting.0.class(), waiting.0.is_blocking());
        let pushed = match is_excess {
            true => self.blocking.push(&image.blocking, class, waiting),
            false => self.admission.push(&image.queue, class, waiting),
        };
        let (operation, buf) = pushed.err()?;
        if is_blocking && !is_excess {
            self.blocking.end(&image.blocking);
        }
        Some(Ended { operation, result: Err(io::Error::from_raw_os_error(libc::ENOMEM)), buf })
    }

    /// Runs queued operations, as far as the limits allow.
    fn admit(&mut self) {
        loop {
            let ended = if let Some(waiting) = self.blocking.next() {
                self.queue(false, waiting)
            } else if let Some((operation, buf)) = self.admission.next() {
                self.begin(operation, buf)
            } else {
                return;
            };
            self.ended.extend(ended);
        }
    }

    /// Drops what a closed connection has waiting; `give` gets the buffers.
    pub(crate) fn abandon(&mut self, conn: Id, mut give: impl FnMut(AlignedBuf)) {
        let is_its = |(operation, _): &Waiting| CtxRef::id(&operation.conn) == conn;
        let Self { admission, blocking, .. } = self;
        blocking.drop_if(is_its, |(_, buf)| buf.into_iter().for_each(&mut give));
        admission.drop_if(is_its, |(operation, buf)| {
            if operation.is_blocking() {
                blocking.end(&operation.target.image.blocking);
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
