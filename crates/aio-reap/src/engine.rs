//! The public handle of an engine. The implementation is in [`core`](crate::core).

use std::future::Future;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::Duration;
use std::{fmt, io, mem};

use offlock_sync::Arc;

use crate::buf::{BufList, HeldBuf, IoBuf, IoBufMut, IoMemory};
use crate::completion_state::Turn;
use crate::core::Core;
use crate::drive::{self, BlockOnWaker, WokenFlag};
use crate::error::{BackendKind, Fallback};
use crate::file::{File, SharedFile};
use crate::op::{AllocateMode, Block, Kind, Op};
use crate::request::{Refusal, Request};
use crate::slab::RequestId;
use crate::stats::EngineStats;

/// An engine for block I/O, owned by one thread. It is neither `Send` nor `Sync`.
///
/// The drop waits for all requests and delivers them, like [`shutdown`](Self::shutdown).
///
/// ```
/// use aio_reap::Engine;
/// use std::cell::Cell;
/// use std::rc::Rc;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
///
/// // The three front ends: an operation, a callback, and (see `CompletionQueue`) a queue.
/// engine.write(&file, b"hello".to_vec(), 0).submit()?.wait().0?;
/// let bytes = Rc::new(Cell::new(0));
/// let seen = Rc::clone(&bytes);
/// engine.read(&file, vec![0; 5], 0).callback(move |read, _buf| seen.set(read.unwrap_or(0)))?;
/// engine.drain()?; // turns until nothing is left
/// assert_eq!(bytes.get(), 5);
///
/// // With futures: the engine is the executor.
/// let synced = engine.block_on(async {
///     let fsync = engine.fsync(&file).submit()?;
///     Ok::<_, std::io::Error>(fsync.await.0?)
/// })?;
/// assert_eq!(synced?, 0);
/// # Ok(())
/// # }
/// ```
pub struct Engine {
    core: Rc<Core>,
    /// Whether the drop ends the engine: not in a call of another thread, which only borrows it.
    is_owner: bool,
}

impl Engine {
    /// Makes the engine of a core, whose drop ends it.
    pub(crate) fn owner(core: Core) -> Self {
        Self { core: Rc::new(core), is_owner: true }
    }

    /// Makes the engine that a call of another thread gets.
    pub(crate) fn borrowed(core: &Rc<Core>) -> Self {
        Self { core: Rc::clone(core), is_owner: false }
    }

    pub(crate) fn core(&self) -> &Rc<Core> {
        &self.core
    }

    /// Returns the backend in use.
    pub fn backend(&self) -> BackendKind {
        self.core.kind
    }

    /// Returns the backends that were tried first, with the reason why each was refused.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.core.fallbacks
    }

    /// Attaches an open file.
    ///
    /// # Errors
    ///
    /// Returns the error of `fcntl` if the descriptor is not open.
    pub fn attach(&self, fd: impl Into<OwnedFd>) -> io::Result<File> {
        SharedFile::new(fd).map(File::shared)
    }

    /// Attaches a file that other threads or engines use too. It has the same descriptor. [`SharedFile`]
    /// has an example.
    pub fn attach_shared(&self, file: &SharedFile) -> File {
        File::shared(file.clone())
    }

    /// Reads `buf.len()` bytes at byte `offset`, or fewer at the end of the file.
    ///
    /// With `O_DIRECT` a read across the end of the file may overwrite the buffer behind the bytes that
    /// it reports.
    pub fn read<B: IoBufMut>(&self, file: &File, buf: B, offset: u64) -> Request<'_, B> {
        let mut buf = HeldBuf::new(buf);
        let memory = IoMemory::plain(buf.get_mut().len(), buf.get_mut().as_mut_ptr());
        self.transfer(Kind::Read, file, memory, buf, offset)
    }

    /// Fills the buffers of `list`, first to last, from byte `offset` on, or reads fewer bytes,
    /// like [`read`](Self::read).
    pub fn read_vectored<B: IoBufMut>(
        &self,
        file: &File,
        list: BufList<B>,
        offset: u64,
    ) -> Request<'_, BufList<B>> {
        let mut list = HeldBuf::new(list);
        let memory = list.get_mut().vectors(|buf| (buf.len(), buf.as_mut_ptr()));
        self.transfer(Kind::Read, file, memory, list, offset)
    }

    /// Writes the buffers of `list`, first to last, from byte `offset` on. It writes all bytes or
    /// fails, like [`write`](Self::write).
    pub fn write_vectored<B: IoBuf>(
        &self,
        file: &File,
        list: BufList<B>,
        offset: u64,
    ) -> Request<'_, BufList<B>> {
        let mut list = HeldBuf::new(list);
        let memory = list.get_mut().vectors(|buf| (buf.len(), buf.as_ptr().cast_mut()));
        self.transfer(Kind::Write, file, memory, list, offset)
    }

    /// Writes `buf.len()` bytes at byte `offset`. It writes all of them or fails
    /// ([`RequestError::transferred`](crate::RequestError::transferred)).
    pub fn write<B: IoBuf>(&self, file: &File, buf: B, offset: u64) -> Request<'_, B> {
        let mut buf = HeldBuf::new(buf);
        let memory = IoMemory::plain(buf.get_mut().len(), buf.get_mut().as_ptr().cast_mut());
        self.transfer(Kind::Write, file, memory, buf, offset)
    }

    /// Makes the file's data and metadata durable (`fsync`): those of every write that completed
    /// before this request was submitted.
    pub fn fsync(&self, file: &File) -> Request<'_, ()> {
        self.ranged(Kind::Fsync, file, 0, 0)
    }

    /// Makes the file's data, and the metadata needed to read it, durable (`fdatasync`): those of
    /// every write that completed before this request was submitted.
    pub fn fdatasync(&self, file: &File) -> Request<'_, ()> {
        self.ranged(Kind::Fdatasync, file, 0, 0)
    }

    /// Reserves, punches or zeroes `len` bytes at `offset` (`fallocate`).
    pub fn allocate(
        &self,
        file: &File,
        mode: AllocateMode,
        offset: u64,
        len: u64,
    ) -> Request<'_, ()> {
        self.ranged(Kind::Allocate(mode), file, offset, len)
    }

    /// Sends a no-op through the kernel. It shows the cost of the engine itself.
    pub fn nop(&self) -> Request<'_, ()> {
        Request::new(&self.core, None, Op::NOP, HeldBuf::new(()))
    }

    fn ranged(&self, kind: Kind, file: &File, offset: u64, len: u64) -> Request<'_, ()> {
        let op = Op { len, ..self.op(kind, file, offset) };
        Request::new(&self.core, Some(file.clone()), op, HeldBuf::new(()))
    }

    fn op(&self, kind: Kind, file: &File, offset: u64) -> Op {
        let block = Block::of(file.alignment());
        Op { kind, block, fd: file.as_fd().as_raw_fd(), offset, ..Op::NOP }
    }

    /// Makes the request of a transfer. The last call of a method of the buffer returned the pointer in
    /// `io`, because a later one could make the pointer invalid.
    #[inline]
    fn transfer<B: 'static>(
        &self,
        kind: Kind,
        file: &File,
        io: IoMemory,
        buf: HeldBuf<B>,
        offset: u64,
    ) -> Request<'_, B> {
        let IoMemory { memory, ptr, len, addresses, lengths } = io;
        let op = Op { memory, ptr, len, ..self.op(kind, file, offset) };
        let accepted = file.accepts(addresses, offset | lengths);
        let request = Request::new(&self.core, Some(file.clone()), op, buf);
        request.check(accepted, Refusal::Misaligned)
    }

    /// Holds requests back until the returned guard, and every other one, is dropped.
    pub fn plug(&self) -> Plug<'_> {
        Plug::new(&self.core)
    }

    /// Submits one batch of pending requests, reaps, and delivers.
    ///
    /// Never blocks. Call it when the [descriptor](AsFd) is readable, or in a loop of the program.
    /// Inside a callback it runs no other callback: it puts completions into queues at once, but
    /// delivers them to callbacks and futures after the callback returns. So callbacks that turn
    /// the engine do not nest.
    pub fn turn(&self) -> Turn {
        self.core.turn(!self.core.is_dispatching.get(), false)
    }

    /// Turns the engine, and sleeps, until at least one completion was delivered, `timeout` is
    /// over, or the engine is idle. Signals do not end it.
    ///
    /// Inside a callback it delivers too, so other callbacks run inside that one.
    ///
    /// # Errors
    ///
    /// The kernel's error if it refuses to wait. Requests stay as they are.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Turn> {
        self.core.wait(timeout, None)
    }

    /// Turns the engine until no request is pending or in flight.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait).
    pub fn drain(&self) -> io::Result<()> {
        self.core.drain()
    }

    /// Tries to cancel a request that was submitted with a callback or to a queue, like
    /// [`Operation::cancel`](crate::Operation::cancel). Returns false if there was no attempt, for
    /// example because the request has completed; a request that is still in flight is then marked,
    /// as described there.
    ///
    /// The id must be of this engine: that of another engine may name an unrelated request.
    pub fn cancel(&self, id: RequestId) -> bool {
        self.core.cancel_id(id)
    }

    /// Runs the queued calls of other threads, then refuses later requests and calls, and delivers
    /// every accepted request before it returns.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait).
    pub fn shutdown(&self) -> io::Result<()> {
        self.core.run_calls(true);
        self.core.close();
        self.core.drain()
    }

    /// Runs a future on this thread, and turns the engine while the future waits.
    ///
    /// Other threads may wake the future. Each call allocates once. The requests that the future makes in
    /// one poll are one batch, as if a [plug](Self::plug) were around the poll, also those of the tasks
    /// that it joins (of a `tokio::task::LocalSet` or the like).
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait). The future is then dropped.
    pub fn block_on<F: Future>(&self, future: F) -> io::Result<F::Output> {
        let core = &self.core;
        let kick = Arc::clone(core.wake_fd.shared_kick());
        let waker = std::sync::Arc::new(BlockOnWaker { woken: WokenFlag::new(), kick });
        let handle = Waker::from(std::sync::Arc::clone(&waker));
        let mut context = Context::from_waker(&handle);
        let mut future = pin!(future);
        drive::block_on(
            &waker.woken,
            || {
                let batch = self.plug();
                let polled = future.as_mut().poll(&mut context);
                if polled.is_pending() {
                    batch.leave(); // the wait below submits
                }
                polled
            },
            || core.wait(None, Some(&waker)).map(drop),
        )
    }

    /// Turns the engine, and sleeps, until the last [`Remote`](crate::Remote) is dropped and every request is
    /// delivered.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait).
    pub fn serve(&self) -> io::Result<()> {
        self.core.serve()
    }

    /// Returns a copy of the counters, which is allocated.
    pub fn stats(&self) -> EngineStats {
        self.core.state.borrow().completions.stats.clone()
    }

    /// Returns whether more than half of the [capacity](crate::EngineBuilder::capacity) is free. A caller
    /// that makes a request only then leaves half of the capacity to the requests of others.
    pub fn is_half_free(&self) -> bool {
        let slab = &self.core.state.borrow().completions.slab;
        slab.free_len() * 2 > slab.capacity()
    }

    /// Checks the invariants of the engine's state, and returns its numbers of requests. Tests and
    /// fuzz targets call it after every step.
    ///
    /// # Panics
    ///
    /// Panics with the name of an invariant that does not hold.
    #[doc(hidden)]
    pub fn validate(&self) -> Turn {
        let core = &self.core;
        let state = core.state.borrow();
        state.validate();
        let between_calls = !core.is_dispatching.get();
        if between_calls && state.needs_retry() && !core.has_work(&state) {
            assert!(core.wake_fd.retry_delay().is_some(), "blocked for ever");
        }
        state.report(0)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.is_owner {
            return;
        }
        let _end = EndOnPanic(&self.core); // also if a call panics in the shutdown
        if !std::thread::panicking() {
            // After an error requests stay undelivered. `State::drop` waits for them or leaks them.
            let _ = self.shutdown();
        }
    }
}

/// On drop during a panic, closes the engine and drops the calls of other threads. No callback runs, and
/// `State::drop` waits for the requests in flight.
struct EndOnPanic<'c>(&'c Core);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.state.borrow_mut().closed = true;
            self.0.drop_calls();
        }
    }
}

/// The descriptor is readable when the engine needs a [`turn`](Engine::turn): a completion is
/// visible, work is left, or a retry is due. It is level-triggered. Never read from it.
impl AsFd for Engine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let core = &self.core;
        let fd = core.wake_fd.fd();
        core.state.borrow_mut().backend.watch();
        // Work that was left before the descriptor was watched.
        let state = core.state.borrow();
        if core.has_work(&state) || state.waiting.is_due(state.completions.slab.free_len()) {
            core.wake_fd.kick();
        }
        core.wake_fd.wake_at(state.deadlines.earliest());
        fd
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Engine");
        debug.field("backend", &self.core.kind);
        if let Ok(state) = self.core.state.try_borrow() {
            debug.field("state", &state.report(0));
        }
        debug.finish_non_exhaustive()
    }
}

/// While a plug lives, requests are only queued. The drop of the last one submits and reaps.
///
/// Plugs nest. They also balance if a panic unwinds through them. The next call that turns the
/// engine then submits the queue, so no callback runs during the unwinding.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let plug = engine.plug();
/// let nops: Vec<_> = (0..8).map(|_| engine.nop().submit()).collect::<Result<_, _>>()?;
/// assert_eq!(engine.stats().submissions, 0);
/// drop(plug);
/// assert_eq!(engine.stats().submissions, 1);
/// for nop in nops {
///     nop.wait().0?;
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "requests are held back only while the plug lives"]
pub struct Plug<'e> {
    core: &'e Core,
}

impl<'e> Plug<'e> {
    pub(crate) fn new(core: &'e Core) -> Self {
        core.plugs.set(core.plugs.get() + 1);
        Self { core }
    }

    /// Ends the plug without a submission. A turn follows.
    pub(crate) fn leave(self) {
        self.core.plugs.set(self.core.plugs.get() - 1);
        mem::forget(self);
    }
}

impl Drop for Plug<'_> {
    fn drop(&mut self) {
        self.core.plugs.set(self.core.plugs.get() - 1);
        if std::thread::panicking() {
            self.core.wake_fd.kick();
        } else {
            self.core.flush_unless_held(true);
        }
    }
}

impl fmt::Debug for Plug<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plug").finish_non_exhaustive()
    }
}
