//! The requests of one worker: answered from the cache, run as futures within a limit, or queued.
//!
//! ```text
//!  start ─► answered from the cache ──────────────────────────────────────► reply
//!      └─► below the limit? ─yes─► a future (commands, tasks) ─► its end ─► reply
//!                └─no─► a queue (admission) ─────┘ ◄── an operation ends ─┘
//! ```
//!
//! A blocking operation ([`Operation::is_blocking`]) may occupy one of the cache's few threads, or the
//! file, for long. So the worker runs and queues only a few of them among the other operations, and
//! READs find free places. Further blocking operations wait in a queue of their own.
//!
//! A request that has begun runs to its end even if its connection is closed. A queued request of a
//! closed connection is dropped.

use std::collections::VecDeque;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Waker;

use aio_reap::{AlignedBuf, Engine, File};
use nbd_protocol::{
    ALLOCATION_ID, Command, CommandFlags, Extent, HeaderStyle, NbdError, ReplyHeader, Request,
};
use radix_ctx::{CtxRef, Id};
use tracing::warn;

use crate::admission::{Admission, Class, Queue, may_queue};
use crate::blocks::{Image, Source};
use crate::commands::Job;
use crate::memory::ALIGN;
use crate::registry::Connection;
use crate::tasks::{self, Panicked, Tasks};

/// The number of failures that are all logged.
const LOGGED: u64 = 64;

/// Returns whether the failure with this number is logged. Later failures are logged ever less
/// often, because the log of a dead disk must not fill another one.
fn is_logged(count: u64) -> bool {
    count <= LOGGED || count.is_power_of_two()
}

/// Limits of the requests of a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Most running operations.
    pub(crate) depth: usize,
    /// Most running or queued operations.
    pub(crate) most: usize,
}

/// Requests and bytes of a worker since it started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    /// Reads answered from the cache.
    pub(crate) hits: u64,
    pub(crate) writes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) flushes: u64,
    pub(crate) other: u64,
    pub(crate) errors: u64,
    /// Errors that came from an image.
    pub(crate) failures: u64,
}

/// Returns whether a command changes the image, or makes changes durable.
fn changes(command: Command) -> bool {
    !matches!(command, Command::Read { .. } | Command::BlockStatus { .. })
}

/// Most blocking operations that run or wait among the others. As many as an image has
/// threads in the cache. With a small depth it is half of the depth, but at least 4.
const MAX_BLOCKING: usize = 16;

/// The requests of a worker, and the engine that carries them out.
pub(crate) struct Requests {
    pub(crate) engine: Rc<Engine>,
    /// The images that connections of the worker have open, or that its operations use.
    images: Vec<Weak<WorkerImage>>,
    tasks: Tasks<Ended>,
    /// Most running or queued operations: see [`Limits`].
    most: usize,
    admission: Admission<Waiting>,
    /// Admits blocking operations to `admission`.
    blocking: Admission<Waiting>,
    /// Operations from the queues that ended when they were started.
    ended: VecDeque<Ended>,
    pub(crate) counters: Counters,
    /// Requests that ended after their connection was closed.
    #[cfg(test)]
    pub(crate) closed: u64,
}

impl Requests {
    /// Makes the requests of one worker. Any thread may call `waker`, when
    /// [`complete`](Self::complete) has something to return.
    pub(crate) fn new(engine: Rc<Engine>, Limits { depth, most }: Limits, waker: Waker) -> Self {
        Self {
            engine,
            images: Vec::new(),
            tasks: Tasks::new(depth, waker),
            most,
            admission: Admission::new(depth),
            blocking: Admission::new((depth / 2).clamp(4, MAX_BLOCKING)),
            // Full capacity from the start, so that it does not grow while requests are served.
            ended: VecDeque::with_capacity(most),
            counters: Counters::default(),
            #[cfg(test)]
            closed: 0,
        }
    }

    /// Returns this worker's state of an image, for a connection that opens it.
    pub(crate) fn open(&mut self, image: &Arc<Image>) -> io::Result<Rc<WorkerImage>> {
        self.images.retain(|known| known.strong_count() > 0);
        let mut known = self.images.iter().filter_map(Weak::upgrade);
        if let Some(known) = known.find(|known| Arc::ptr_eq(&known.image, image)) {
            return Ok(known);
        }
        let opened = WorkerImage::new(Arc::clone(image), image.source.attach(&self.engine)?);
        self.images.push(Rc::downgrade(&opened));
        Ok(opened)
    }

    /// Returns whether one more request of this image may run or queue.
    pub(crate) fn has_room(&self, WorkerImage { queue, blocking, .. }: &WorkerImage) -> bool {
        let used = self.admission.running() + self.waiting();
        may_queue(self.most, used, || queue.running() + queue.waiting() + blocking.waiting())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.admission.running() + self.waiting() == 0 && self.ended.is_empty()
    }

    /// Returns whether [`complete`](Self::complete) has nothing to return.
    pub(crate) fn nothing_completed(&self) -> bool {
        self.ended.is_empty() && !self.tasks.is_ready()
    }

    /// Returns the number of running operations.
    #[cfg(test)]
    pub(crate) fn begun(&self) -> usize {
        self.admission.running()
    }

    /// Returns the number of running operations of each image that has some.
    pub(crate) fn begun_by_image(&self) -> Vec<(String, usize)> {
        let images = self.images.iter().filter_map(Weak::upgrade);
        let begun = images.map(|its| (its.image.name.clone(), its.queue.running()));
        begun.filter(|&(_, count)| count > 0).collect()
    }

    /// Starts a request. Returns its reply if it was answered at once.
    ///
    /// `buf` is the buffer of a READ or BLOCK_STATUS, or the data of a WRITE.
    pub(crate) fn start(
        &mut self,
        conn: &CtxRef<Connection>,
        target: &Target,
        request: Request,
        command: Command,
        mut buf: Option<AlignedBuf>,
    ) -> Option<Step> {
        self.count(command, request.len);
        let mut written = 0;
        let image = &target.image;
        // A request that the cache answers needs no operation and no reference to its connection.
        if let Some(result) = self.answer(&image.image, command, &request, &mut buf, &mut written) {
            let result = self.reply_result(&request, result);
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
        self.admit(); // a queued operation may be able to run
        None
    }

    /// Returns the result of a request that needs no wait. Sets `written` to the bytes of a WRITE
    /// that the cache has taken.
    fn answer(
        &mut self,
        image: &Image,
        command: Command,
        request: &Request,
        buf: &mut Option<AlignedBuf>,
        written: &mut usize,
    ) -> Option<io::Result<()>> {
        let Request { offset, len, .. } = *request;
        if let (Command::Read { .. }, Some(buf)) = (command, &mut *buf) {
            buf.set_len(len as usize); // the buffer may have room for whole units around them
        }
        if len == 0 && command != Command::Flush {
            return Some(Ok(())); // nothing to do, and fallocate refuses an empty range
        }
        if image.has_failed() && changes(command) {
            return Some(Err(io::Error::from_raw_os_error(libc::EIO)));
        }
        match (command, buf) {
            (Command::Read { .. }, Some(buf)) => {
                let hit = image.try_read(offset, buf);
                self.counters.hits += u64::from(hit);
                hit.then_some(Ok(()))
            }
            (Command::Write { fua }, Some(buf)) if !image.bypasses_cache(len, true) => {
                match image.try_write(offset, buf) {
                    Ok(done) if done == buf.len() && !fua => Some(Ok(())),
                    Ok(done) => {
                        *written = done;
                        None
                    }
                    Err(error) => Some(Err(image.of_get(error))),
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

    /// Returns the number of queued operations.
    pub(crate) fn waiting(&self) -> usize {
        self.admission.waiting() + self.blocking.waiting()
    }

    /// Counts and logs a failure, and turns it into the error that the client gets.
    fn reply_result(&mut self, request: &Request, result: io::Result<()>) -> Result<(), NbdError> {
        result.map_err(|error| {
            self.counters.errors += 1;
            // Not a failure: the client asked for zeros only if the image makes them fast.
            let is_fast = request.flags.contains(CommandFlags::FAST_ZERO);
            if is_fast && error.raw_os_error() == Some(libc::EOPNOTSUPP) {
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

    /// Starts an admitted operation. Returns it if it ends at once.
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
            let image = &operation.target.image.image;
            let (mut result, buf) = tasks::contain(job.run(buf)).await.unwrap_or_else(|Panicked| {
                image.fail();
                // The panic dropped the buffer, or the engine still has it. Return another one of
                // its size, to credit the account.
                let buf = size.and_then(|size| AlignedBuf::try_zeroed(size, ALIGN));
                (Err(io::Error::from_raw_os_error(libc::EIO)), buf)
            });
            if result.is_ok() && image.has_failed() && changes(command) {
                result = Err(io::Error::from_raw_os_error(libc::EIO)); // it failed meanwhile
            }
            Ended { operation, result, buf }
        })?;
        self.release_place(&ended.operation);
        Some(ended)
    }

    /// Releases the place of an operation that has ended.
    fn release_place(&mut self, operation: &Operation) {
        let image = &operation.target.image;
        self.admission.end(&image.queue);
        if operation.is_blocking() {
            self.blocking.end(&image.blocking);
        }
    }

    /// Returns the reply of an operation that has ended.
    fn end(&mut self, Ended { operation, result, buf }: Ended) -> Step {
        let Operation { ref request, command, ref target, .. } = operation;
        let result = self.reply_result(request, result);
        Step::reply((request, command), target, result, buf)
    }

    /// Queues an operation; with `is_excess`, among the blocking operations beyond the limit.
    /// Returns it with an error if there is no memory.
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

    /// Starts queued operations, as far as the limits allow.
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

    /// Drops the queued operations of a closed connection. `give` gets their buffers.
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
        self.admit(); // may start blocking operations of other connections
    }

    /// Polls woken operations until one ends. Returns its reply and the slot of its connection;
    /// `None` if no operation ends. If the connection is closed, only the buffer is returned.
    pub(crate) fn complete(&mut self) -> Option<Result<(usize, Step), Option<AlignedBuf>>> {
        let ended = self.ended.pop_front().or_else(|| {
            let ended = self.tasks.next()?;
            self.release_place(&ended.operation);
            self.admit(); // a slot is free
            Some(ended)
        })?;
        let conn = &ended.operation.conn;
        let slot = *conn.slot.get().expect("its worker set it before its first request");
        let closed = CtxRef::is_removed(conn);
        let step = self.end(ended);
        if closed {
            // The request was carried out nevertheless.
            #[cfg(test)]
            {
                self.closed += 1;
            }
            return Some(Err(step.data.or(step.spent)));
        }
        Some(Ok((slot, step)))
    }
}

/// The reply of a request, and a buffer that the request no longer needs.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) header: ReplyHeader,
    /// The payload behind the header.
    pub(crate) data: Option<AlignedBuf>,
    /// A buffer to release to the connection's account.
    pub(crate) spent: Option<AlignedBuf>,
}

/// A queued operation, and its buffer.
pub(crate) type Waiting = (Operation, Option<AlignedBuf>);

/// An image within one worker. Shared by the worker's connections that have it open, and by their
/// operations.
pub(crate) struct WorkerImage {
    /// Attached to the worker's engine. A field before `image`, so that it is dropped before the
    /// last reference to the image.
    pub(crate) source: Source<File>,
    pub(crate) image: Arc<Image>,
    pub(crate) queue: Rc<Queue<Waiting>>,
    /// The queue of blocking operations.
    pub(crate) blocking: Rc<Queue<Waiting>>,
}

impl WorkerImage {
    pub(crate) fn new(image: Arc<Image>, source: Source<File>) -> Rc<Self> {
        Rc::new(Self { source, image, queue: Queue::new(), blocking: Queue::new() })
    }
}

/// The image and the export of a connection's requests.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) image: Rc<WorkerImage>,
    /// The granularity of the export's extents, in bytes.
    pub(crate) unit: u64,
    /// The style of reply headers.
    pub(crate) style: HeaderStyle,
}

/// A request that was not answered at once.
pub(crate) struct Operation {
    pub(crate) conn: CtxRef<Connection>,
    pub(crate) target: Target,
    pub(crate) request: Request,
    pub(crate) command: Command,
    /// Bytes of a WRITE that are in the cache already.
    pub(crate) written: usize,
}

/// An operation that has ended, and its buffer.
pub(crate) struct Ended {
    pub(crate) operation: Operation,
    pub(crate) result: io::Result<()>,
    pub(crate) buf: Option<AlignedBuf>,
}

impl Operation {
    /// Returns whether the operation may keep a thread of the cache or the kernel's lock of the file
    /// for long.
    pub(crate) fn is_blocking(&self) -> bool {
        let Self { command, .. } = self;
        matches!(command, Command::Flush | Command::BlockStatus { .. })
            || matches!(command, Command::Trim { .. } | Command::WriteZeroes { .. })
    }

    /// Returns the priority of the operation in a queue.
    pub(crate) fn class(&self) -> Class {
        let len = self.request.len;
        match self.command {
            Command::Flush => Class::Sync,
            Command::BlockStatus { .. } => Class::SmallRead,
            Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. } => {
                Class::of_write(len)
            }
            Command::Read { .. } | Command::Cache | Command::Disconnect => Class::of_read(len),
        }
    }
}

impl Step {
    /// Makes the reply of a request.
    pub(crate) fn reply(
        (request, command): (&Request, Command),
        target: &Target,
        result: Result<(), NbdError>,
        buf: Option<AlignedBuf>,
    ) -> Self {
        let style = target.style;
        match (command, result) {
            (Command::Read { .. }, Ok(())) => {
                let header = ReplyHeader::read_data(request, style);
                let data = buf.map(|mut buf| {
                    buf.set_len(request.len as usize); // as the header says
                    buf
                });
                Self { header, data, spent: None }
            }
            (Command::BlockStatus { .. }, Ok(())) => {
                let count = buf.as_ref().map_or(0, |buf| buf.len() / Extent::size(style)) as u32;
                let header = ReplyHeader::block_status(request, style, ALLOCATION_ID, count);
                Self { header, data: buf, spent: None }
            }
            (_, Ok(())) => {
                let header = ReplyHeader::done(request, style);
                Self { header, data: None, spent: buf }
            }
            (_, Err(error)) => Self { spent: buf, ..Self::refuse(request, style, error) },
        }
    }

    pub(crate) fn refuse(request: &Request, style: HeaderStyle, error: NbdError) -> Self {
        let header = ReplyHeader::error(request, style, error);
        Self { header, data: None, spent: None }
    }
}
