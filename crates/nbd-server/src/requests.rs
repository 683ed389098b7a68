//! The requests of one worker: answered from the cache, run as futures within a limit, or queued.
//!
//! ```text
//!  start ─► answered from the cache ─────────────────────────────────────────────────────► reply
//!      └─► a queue (admission) ─ below the limit ─► a future (commands, tasks) ─► its end ─► reply
//!                 ▲ an operation ends ───────────────────────────────────────────────┘
//! ```
//!
//! A blocking operation ([`Kind::Blocking`]) may occupy one of the cache's few threads, or the file,
//! for long. So blocking operations have a limit and queues of their own, and READs find free places.
//!
//! A request that has begun runs to its end even if its connection is closed. A queued request of a
//! closed connection is dropped.

use std::io;
use std::panic::AssertUnwindSafe;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Waker;

use aio_reap::{AlignedBuf, Engine, File};
use futures_util::FutureExt;
use nbd_protocol::{
    ALLOCATION_ID, Command, CommandFlags, Extent, HeaderStyle, NbdError, ReplyHeader, Request,
};
use radix_ctx::{CtxRef, Id};
use tracing::warn;

use crate::admission::{Admission, Class, Queue, may_queue};
use crate::blocks::{Image, Source};
use crate::commands::Job;
use crate::memory::{ALIGN, BufferPool};
use crate::registry::Connection;
use crate::tasks::Tasks;

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

/// Most running blocking operations, besides the others. As many as an image has threads in the
/// cache. With a small depth it is half of the depth, but at least 4.
pub(crate) const MAX_BLOCKING: usize = 16;

/// The requests of a worker, and the engine that carries them out.
pub(crate) struct Requests {
    pub(crate) engine: Rc<Engine>,
    /// The images that connections of the worker have open, or that its operations use.
    images: Vec<Weak<WorkerImage>>,
    tasks: Tasks<Operation>,
    /// Most running or queued operations: see [`Limits`].
    most: usize,
    /// By [`Kind`].
    admissions: [Admission<Operation>; 2],
    /// Running operations for which [`Operation::needs_thread`] returns true.
    on_threads: usize,
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
            tasks: Tasks::new(waker),
            most,
            admissions: [depth, (depth / 2).clamp(4, MAX_BLOCKING)].map(Admission::new),
            on_threads: 0,
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
    pub(crate) fn has_room(&self, image: &WorkerImage) -> bool {
        let its = |queue: &Rc<Queue<_>>| queue.running() + queue.waiting();
        may_queue(self.most, self.running() + self.waiting(), || image.queues.iter().map(its).sum())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running() + self.waiting() == 0
    }

    /// Returns whether [`complete`](Self::complete) has nothing to return.
    pub(crate) fn nothing_completed(&self) -> bool {
        !self.tasks.is_ready()
    }

    /// Returns whether threads of the kernel may be at work for running operations.
    pub(crate) fn need_threads(&self) -> bool {
        self.on_threads > 0
    }

    /// Returns the number of running operations.
    pub(crate) fn running(&self) -> usize {
        self.admissions.iter().map(Admission::running).sum()
    }

    /// Returns the number of queued operations.
    pub(crate) fn waiting(&self) -> usize {
        self.admissions.iter().map(Admission::waiting).sum()
    }

    /// Returns the number of running operations of each image that has some.
    pub(crate) fn begun_by_image(&self) -> Vec<(String, usize)> {
        let images = self.images.iter().filter_map(Weak::upgrade);
        let running = |its: &WorkerImage| its.queues.iter().map(|queue| queue.running()).sum();
        let begun = images.map(|its| (its.image.name.clone(), running(&its)));
        begun.filter(|&(_, count)| count > 0).collect()
    }

    /// Starts a request. Returns its reply if it was answered at once.
    ///
    /// `unit` is the granularity of the export's extents, in bytes. `buf` is the buffer of a READ or
    /// BLOCK_STATUS, or the data of a WRITE.
    pub(crate) fn start(
        &mut self,
        conn: &CtxRef<Connection>,
        (image, unit, style): (&Rc<WorkerImage>, u64, HeaderStyle),
        request: Request,
        command: Command,
        mut buf: Option<AlignedBuf>,
    ) -> Option<Step> {
        self.count(command, request.len);
        let mut written = 0;
        // A request that the cache answers needs no operation and no reference to its connection.
        if let Some(result) = self.answer(&image.image, command, &request, &mut buf, &mut written) {
            return Some(self.reply((&request, command), style, result, buf));
        }
        let job = Job {
            engine: Rc::clone(&self.engine),
            source: image.source.clone(),
            image: Arc::clone(&image.image),
            unit,
            style,
            command,
            request,
            written,
        };
        let operation =
            Operation { conn: conn.clone(), image: Rc::clone(image), job, buf, result: Ok(()) };
        let (kind, class) = (operation.kind() as usize, operation.class());
        if let Err(operation) = self.admissions[kind].push(&image.queues[kind], class, operation) {
            let no_memory = Err(io::Error::from_raw_os_error(libc::ENOMEM));
            return Some(self.reply((&request, command), style, no_memory, operation.buf));
        }
        self.admit();
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
                    Err(error) => Some(Err(image.get_error_to_io(error))),
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

    /// Makes the reply of a request. Counts and logs a failure, and turns it into the error that the
    /// client gets.
    fn reply(
        &mut self,
        (request, command): (&Request, Command),
        style: HeaderStyle,
        result: io::Result<()>,
        buf: Option<AlignedBuf>,
    ) -> Step {
        let result = result.map_err(|error| {
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
        });
        Step::reply((request, command), style, result, buf)
    }

    /// Starts queued operations, as far as the limits allow.
    fn admit(&mut self) {
        for admission in &mut self.admissions {
            while let Some(operation) = admission.next() {
                self.on_threads += usize::from(operation.needs_thread());
                self.tasks.spawn(operation.run());
            }
        }
    }

    /// Drops the queued operations of a closed connection. `give` gets their buffers.
    pub(crate) fn abandon(&mut self, conn: Id, mut give: impl FnMut(AlignedBuf)) {
        for admission in &mut self.admissions {
            let is_its = |operation: &Operation| CtxRef::id(&operation.conn) == conn;
            admission.drop_if(is_its, |operation| operation.buf.into_iter().for_each(&mut give));
        }
    }

    /// Polls woken operations until one ends. Returns the slot of its connection, unless this is closed,
    /// and its reply; `None` if no operation ends.
    pub(crate) fn complete(&mut self) -> Option<(Option<usize>, Step)> {
        let operation = self.tasks.next()?;
        let kind = operation.kind() as usize;
        self.on_threads -= usize::from(operation.needs_thread());
        self.admissions[kind].end(&operation.image.queues[kind]);
        self.admit(); // a place is free
        let Operation { conn, job, buf, result, .. } = operation;
        let step = self.reply((&job.request, job.command), job.style, result, buf);
        if CtxRef::is_removed(&conn) {
            // The request was carried out nevertheless.
            #[cfg(test)]
            {
                self.closed += 1;
            }
            return Some((None, step));
        }
        Some((Some(*conn.slot.get().expect("its worker set it before its first request")), step))
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

/// An image within one worker. Shared by the worker's connections that have it open, and by their
/// operations.
pub(crate) struct WorkerImage {
    /// Attached to the worker's engine. A field before `image`, so that it is dropped before the
    /// last reference to the image.
    pub(crate) source: Source<File>,
    pub(crate) image: Arc<Image>,
    /// By [`Kind`].
    pub(crate) queues: [Rc<Queue<Operation>>; 2],
}

impl WorkerImage {
    pub(crate) fn new(image: Arc<Image>, source: Source<File>) -> Rc<Self> {
        Rc::new(Self { source, image, queues: [Queue::new(), Queue::new()] })
    }
}

/// The operations that have limits and queues of their own.
#[derive(Clone, Copy)]
enum Kind {
    Transfer,
    /// May keep a thread of the cache or the kernel's lock of the file for long.
    Blocking,
}

/// A request that was not answered at once, until its reply.
pub(crate) struct Operation {
    conn: CtxRef<Connection>,
    image: Rc<WorkerImage>,
    job: Job,
    buf: Option<AlignedBuf>,
    /// The result, once the operation has ended.
    result: io::Result<()>,
}

/// Bytes that a thread of the kernel copies in about the time for which a worker polls. With longer WRITEs in
/// flight a worker that does not poll leaves its READs to the ticks of the scheduler.
const LONGEST_COPY: u64 = 256 << 10;

impl Operation {
    /// Carries the request out.
    async fn run(mut self) -> Self {
        let Self { image: its, job, buf, .. } = &mut self;
        let image = &its.image;
        let size = buf.as_ref().map(AlignedBuf::capacity);
        // A panic, which the hook has reported, ends the request and not its worker.
        let run = AssertUnwindSafe(job.run(buf.take())).catch_unwind();
        let (mut result, buf) = run.await.unwrap_or_else(|_| {
            image.fail();
            // The panic dropped the buffer, or the engine still has it. Return another one of its size,
            // to credit the account.
            let buf = size.and_then(|size| AlignedBuf::try_zeroed(size, ALIGN));
            (Err(io::Error::from_raw_os_error(libc::EIO)), buf)
        });
        if result.is_ok() && image.has_failed() && changes(job.command) {
            result = Err(io::Error::from_raw_os_error(libc::EIO)); // it failed meanwhile
        }
        Self { result, buf, ..self }
    }

    fn kind(&self) -> Kind {
        match self.job.command {
            Command::Read { .. } | Command::Write { .. } => Kind::Transfer,
            _ => Kind::Blocking,
        }
    }

    /// Returns whether a thread of the kernel makes the operation, which needs a CPU for less time than the
    /// worker polls: one that changes a file on the page cache, but copies no long payload. READs of
    /// such files wait for the device without a thread.
    fn needs_thread(&self) -> bool {
        let is_long = matches!(self.job.command, Command::Write { .. })
            && self.job.request.len > LONGEST_COPY;
        self.image.image.is_buffered && changes(self.job.command) && !is_long
    }

    /// Returns the priority of the operation in a queue.
    fn class(&self) -> Class {
        let len = self.job.request.len;
        match self.job.command {
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
    /// Returns the bytes of the reply.
    pub(crate) fn len(&self) -> usize {
        self.header.as_slice().len() + self.data.as_ref().map_or(0, |data| data.len())
    }

    /// Releases the buffer of a reply that is not sent, because its connection is closed.
    pub(crate) fn release(self, memory: &mut BufferPool) {
        self.data.into_iter().chain(self.spent).for_each(|buf| memory.release(buf, None));
    }

    /// Makes the reply of a request.
    fn reply(
        (request, command): (&Request, Command),
        style: HeaderStyle,
        result: Result<(), NbdError>,
        buf: Option<AlignedBuf>,
    ) -> Self {
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
