//! Linux AIO by raw system calls. Its completion ring is read in user memory.
//!
//! Only `O_DIRECT` reads and writes use Linux AIO. For other operations `io_submit` blocks or
//! fails, so a small thread pool performs them.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;
use std::{io, mem, ptr, slice};

use offlock_sync::atomic::{AtomicU32, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::order;

use super::Backend;
use super::threads::Pool;
use crate::op::{Kind, RawCompletion, Stop, Sub, Submitted};
use crate::slab::Batch;
use crate::sys;

// Kernel ABI (include/uapi/linux/aio_abi.h).
const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;
const IOCB_FLAG_RESFD: u32 = 1;
const RING_MAGIC: u32 = 0xa10a_10a1;

/// A request to the kernel: `struct iocb`, which the libc crate declares only for glibc.
#[repr(C)]
#[derive(Default)]
struct ControlBlock {
    data: u64,
    /// `aio_key` and `aio_rw_flags`, whose order depends on the byte order. Zero here.
    key_and_flags: [u32; 2],
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

const _: () = assert!(size_of::<ControlBlock>() == 64);

/// The head of the mapping at an `aio_context_t` (fs/aio.c; stable since 2.6, and every libaio
/// relies on it).
#[repr(C)]
struct RingHeader {
    id: u32,
    nr: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_length: u32,
}

const _: () = assert!(cfg!(offlock_model) || size_of::<RingHeader>() == 32);

/// A kernel AIO context. The drop destroys it, which waits for requests in flight.
struct Context(libc::c_ulong);

impl Context {
    fn new(depth: usize) -> io::Result<Self> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel stores one id in `id`.
        let ret = unsafe { libc::syscall(libc::SYS_io_setup, depth as libc::c_uint, &raw mut id) };
        sys::check(ret)?;
        Ok(Self(id))
    }

    /// Returns the ring of the context.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if its header is not the known one.
    fn ring(&self, depth: usize) -> io::Result<Ring<'static>> {
        let header = ptr::with_exposed_provenance::<RingHeader>(self.0 as usize);
        // SAFETY: `io_setup` has stored the page-aligned address of the ring, which is mapped until
        // io_destroy.
        let header: &'static RingHeader = unsafe { &*header };
        let known = header.magic == RING_MAGIC
            && header.incompat_features == 0
            && header.header_length as usize == size_of::<RingHeader>()
            && header.nr as usize > depth; // one slot stays empty
        if !known {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let first = ptr::from_ref(header).wrapping_add(1).cast::<UnsafeCell<Event>>();
        // SAFETY: `nr` events follow the header in the mapping, and `UnsafeCell<Event>` has the
        // layout of `Event`.
        let events = unsafe { slice::from_raw_parts(first, header.nr as usize) };
        // SAFETY: the kernel writes events before it moves the tail, and reads the head before it
        // reuses one. `Aio::new` makes one `Ring` per context, and no code calls io_getevents.
        Ok(unsafe { Ring::new(&header.head, &header.tail, events) })
    }

    fn submit(&self, pointers: &mut [*mut ControlBlock]) -> io::Result<usize> {
        let (count, list) = (pointers.len(), pointers.as_mut_ptr());
        // SAFETY: `list` has `count` pointers to control blocks, which the kernel copies before it
        // returns. By contract 2 of `backend` their buffers live until the completion.
        let ret = unsafe { libc::syscall(libc::SYS_io_submit, self.0, count, list) };
        sys::check(ret).map(|accepted| accepted as usize)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: this value owns the id, which is not used again.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// The backend on a context of Linux AIO and a thread pool.
pub(crate) struct Aio {
    ring: Ring<'static>,
    /// This vector and the next two are reused by every submission.
    batch: Vec<Sub>,
    iocbs: Vec<ControlBlock>,
    pointers: Vec<*mut ControlBlock>,
    notifier: OwnedFd,
    /// The notifier may be polled, so each turn clears it by a system call.
    watched: bool,
    pool: Pool,
    /// The number of requests that were submitted to the context and not reaped.
    in_context: usize,
    // Dropped after `ring`, which points into its mapping.
    context: Context,
}

impl Aio {
    /// Makes a context for `depth` requests in flight, and a pool of at most `workers` threads.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if the system's `aio-max-nr` is used up, `ENOSYS` or `EPERM` if AIO is disabled,
    /// `EOPNOTSUPP` if the kernel's ring is not the known one.
    pub(crate) fn new(workers: usize, depth: usize) -> io::Result<Self> {
        let context = Context::new(depth)?;
        let ring = context.ring(depth)?;
        Ok(Self {
            ring,
            batch: Vec::with_capacity(depth),
            iocbs: Vec::with_capacity(depth),
            pointers: Vec::with_capacity(depth),
            notifier: sys::eventfd()?,
            watched: false,
            pool: Pool::new(workers, depth)?,
            in_context: 0,
            context,
        })
    }

    fn control_block(&self, Sub { user_data, op }: &Sub) -> ControlBlock {
        let read = op.kind == Kind::Read;
        // `nbytes` is a number of bytes or of vectors, depending on the opcode.
        let (opcode, nbytes) = match op.memory.vector_count() {
            Some(count) if read => (IOCB_CMD_PREADV, count.into()),
            Some(count) => (IOCB_CMD_PWRITEV, count.into()),
            _ if read => (IOCB_CMD_PREAD, op.len),
            _ => (IOCB_CMD_PWRITE, op.len),
        };
        ControlBlock {
            data: *user_data,
            opcode,
            fd: op.fd as u32,
            buf: op.ptr.expose_provenance() as u64,
            nbytes,
            offset: op.offset as i64,
            flags: IOCB_FLAG_RESFD,
            resfd: self.notifier.as_raw_fd() as u32,
            ..ControlBlock::default()
        }
    }

    /// Submits requests, all of which suit AIO.
    fn submit_run(&mut self, run: &[Sub]) -> Submitted {
        self.iocbs.clear();
        for sub in run {
            let iocb = self.control_block(sub);
            self.iocbs.push(iocb);
        }
        self.pointers.clear();
        self.pointers.extend(self.iocbs.iter_mut().map(ptr::from_mut));
        let mut accepted = 0;
        while accepted < run.len() {
            match self.context.submit(&mut self.pointers[accepted..]) {
                Ok(0) => return Submitted { accepted, stop: Some(Stop::Busy) },
                Ok(more) => {
                    accepted += more;
                    self.in_context += more;
                }
                Err(error) => {
                    let stop = match error.raw_os_error().unwrap_or(libc::EIO) {
                        libc::EINTR => continue,
                        libc::EAGAIN => Stop::Busy,
                        errno => Stop::Failed(errno), // the error is about the first request that was not accepted
                    };
                    return Submitted { accepted, stop: Some(stop) };
                }
            }
        }
        Submitted { accepted, stop: None }
    }

    fn submit_all(&mut self, batch: &[Sub]) -> Submitted {
        let mut accepted = 0;
        while let Some(first) = batch.get(accepted) {
            if suits_aio(first) {
                let rest = &batch[accepted..];
                let run = rest.iter().take_while(|sub| suits_aio(sub)).count();
                let submitted = self.submit_run(&rest[..run]);
                accepted += submitted.accepted;
                if submitted.stop.is_some() {
                    return Submitted { accepted, ..submitted };
                }
            } else if self.pool.push(*first).is_ok() {
                accepted += 1;
            } else {
                return Submitted { accepted, stop: Some(Stop::Busy) };
            }
        }
        Submitted { accepted, stop: None }
    }
}

/// Returns whether io_submit starts the request without blocking.
fn suits_aio(sub: &Sub) -> bool {
    sub.op.block.is_direct() && sub.op.transfers()
}

impl Backend for Aio {
    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        let mut subs = mem::take(&mut self.batch);
        subs.extend(batch);
        let submitted = self.submit_all(&subs);
        subs.clear();
        self.batch = subs;
        submitted
    }

    fn reap(&mut self, each: &mut dyn FnMut(RawCompletion)) {
        self.in_context -= self.ring.consume(self.in_context, |event| {
            each(RawCompletion { user_data: event.data, result: event.res as i32 });
        });
        self.pool.reap(each);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        sys::drain(&self.notifier); // the notifications of completions that were reaped
        if self.ring.is_empty() {
            super::wait_readable(&[self.notifier.as_raw_fd(), self.pool.notifier()], timeout)?;
        }
        Ok(())
    }

    /// Cancels only requests that wait for a thread: the kernel cannot cancel block I/O
    /// (`io_cancel`).
    fn cancel(&mut self, user_data: u64) -> bool {
        self.pool.cancel(user_data)
    }

    fn watch(&mut self) {
        self.watched = true;
    }

    fn acknowledge(&mut self) {
        if self.watched {
            sys::drain(&self.notifier);
        }
        self.pool.acknowledge();
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.notifier.as_raw_fd(), self.pool.notifier()]
    }
}

// Linux AIO's completion ring, read in the memory that the kernel shares.
//
// ```text
//  | id nr head tail magic compat incompat header_length | event 0 | event 1 | ... | event nr-1 |
//              ▲    ▲
//  the engine's┘    └ the kernel's: stores events, then the tail (Release)
//  consumer: load tail (Acquire), copy events head..tail, store head (Release)
// ```
//
// # Invariants
//
// 1. The engine, which is `!Sync`, is the only consumer. Only it writes `head`.
// 2. `head`, as used here, is below `nr`, for every value in the memory.
// 3. An event is copied after the load of a tail that covers it, and before the head passes it.

/// `struct io_event` of the kernel's ABI.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Event {
    /// The request's `aio_data`.
    pub(crate) data: u64,
    /// The address of the request's `struct iocb`.
    pub(crate) obj: u64,
    /// A number of bytes or a negated errno.
    pub(crate) res: i64,
    /// A second result, which block I/O does not use.
    pub(crate) res2: i64,
}

/// The consumer's side of the ring.
pub(crate) struct Ring<'a> {
    head: &'a AtomicU32,
    tail: &'a AtomicU32,
    events: &'a [UnsafeCell<Event>],
}

impl<'a> Ring<'a> {
    /// Borrows a ring.
    ///
    /// # Safety
    ///
    /// 1. `events[i]` for i from head to tail (modulo the length) is not written until the head
    ///    passes it. The producer publishes it by a Release store of `tail`.
    /// 2. No other `Ring` over the same memory is in use.
    pub(crate) unsafe fn new(
        head: &'a AtomicU32,
        tail: &'a AtomicU32,
        events: &'a [UnsafeCell<Event>],
    ) -> Self {
        Self { head, tail, events }
    }

    /// Returns whether no event is visible.
    fn is_empty(&self) -> bool {
        // Ordering: Relaxed, for both; a hint. The kernel stores the tail before it notifies, under the
        // lock of the eventfd, so the notification of an event that is missed here comes later.
        let [head, tail] = [self.head, self.tail].map(|at| at.load(Ordering::Relaxed));
        let nr = self.events.len() as u32;
        head % nr == tail % nr
    }

    /// Passes copies of at most `most` events to `each`, oldest first. Returns their number. Wait-free.
    pub(crate) fn consume(&mut self, most: usize, mut each: impl FnMut(Event)) -> usize {
        let nr = self.events.len() as u32;
        if most == 0 || nr == 0 {
            return 0;
        }
        // Ordering: Relaxed; only this thread stores the head (invariant 1).
        let mut head = self.head.load(Ordering::Relaxed) % nr;
        // Ordering: Acquire pairs with the producer's Release store of the tail (the kernel's
        // `smp_wmb` before it); it carries the events below the tail.
        let tail = self.tail.load(order!(Acquire, "consume: the events are written")) % nr;
        let mut taken = 0;
        while head != tail && taken < most {
            // SAFETY: by condition 1 of `new` the producer wrote this event before it stored the
            // tail that was loaded here, and does not write it until the head passes it.
            let event = self.events[head as usize].with(|event| unsafe { *event });
            head = (head + 1) % nr;
            taken += 1;
            each(event);
        }
        if taken > 0 {
            // Ordering: Release pairs with the producer's Acquire load of the head; the reads of
            // the events happen before the producer overwrites them.
            self.head.store(head, order!(Release, "consume: the events are read"));
        }
        taken
    }
}
