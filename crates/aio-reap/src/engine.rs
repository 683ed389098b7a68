//! The engine: one thread's door to the kernel's asynchronous I/O.
//!
//! `Core` drives `State` (the books) and is the only place that runs user code: callbacks,
//! wake-ups and drops happen in `dispatch`, never while the state is borrowed.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use percpu::sync::atomic::{AtomicBool, Ordering};
use percpu::sync::{Arc, panicking};

use crate::buf::{IoBuf, IoBufMut};
use crate::builder::{BackendKind, EngineBuilder, Fallback, StartError};
use crate::cargo::Cargo;
use crate::doorbell::Doorbell;
use crate::file::File;
use crate::op::{AllocateMode, Kind, Op};
use crate::plug::Plug;
use crate::request::Request;
use crate::slab::{Front, Index, State as SlotState};
use crate::state::{Delivery, State};
use crate::stats::EngineStats;
use crate::sys;

/// Block I/O for one thread; neither `Send` nor `Sync`.
///
/// Dropping it waits for everything in flight and delivers it, as [`shutdown`](Self::shutdown).
pub struct Engine {
    core: Rc<Core>,
}

/// What a call that turned the engine found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// Completions delivered by this call.
    pub delivered: usize,
    /// Requests the engine still holds that the kernel is not working on: not handed over yet,
    /// or complete and not delivered yet.
    pub pending: usize,
    /// Requests the kernel is working on.
    pub in_flight: usize,
}

impl Turn {
    /// Nothing left to do.
    pub fn is_idle(&self) -> bool {
        self.pending == 0 && self.in_flight == 0
    }
}

impl Engine {
    /// An engine with the default limits on the best backend the system allows.
    ///
    /// # Errors
    ///
    /// As [`EngineBuilder::build`].
    pub fn new() -> Result<Self, StartError> {
        Self::builder().build()
    }

    /// Chooses limits and backend.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    pub(crate) fn from_parts(
        state: State,
        kind: BackendKind,
        fallbacks: Vec<Fallback>,
    ) -> io::Result<Self> {
        let doorbell = Doorbell::new(&state.backend.wake_fds())?;
        let core = Core {
            state: RefCell::new(state),
            doorbell,
            kind,
            fallbacks,
            plugs: Cell::new(0),
            dispatching: Cell::new(false),
        };
        Ok(Self { core: Rc::new(core) })
    }

    pub(crate) fn core(&self) -> &Rc<Core> {
        &self.core
    }

    /// The backend in use.
    pub fn backend(&self) -> BackendKind {
        self.core.kind
    }

    /// Backends that were tried first, and why each was refused.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.core.fallbacks
    }

    /// Attaches an open file.
    ///
    /// # Errors
    ///
    /// The system call's error when the descriptor is not open.
    pub fn attach(&self, fd: impl Into<OwnedFd>) -> io::Result<File> {
        File::new(fd.into())
    }

    /// Reads `buf.len()` bytes at byte `offset`; fewer only at the end of the file.
    pub fn read<B: IoBufMut>(&self, file: &File, mut buf: B, offset: u64) -> Request<'_, B> {
        let op = transfer(Kind::Read, file, buf.as_mut_ptr(), buf.len(), offset);
        Request::new(self, Some(file.clone()), op, buf)
    }

    /// Writes `buf.len()` bytes at byte `offset`, all or an error.
    ///
    /// After an error any part of the range may have been written.
    pub fn write<B: IoBuf>(&self, file: &File, buf: B, offset: u64) -> Request<'_, B> {
        let op = transfer(Kind::Write, file, buf.as_ptr().cast_mut(), buf.len(), offset);
        Request::new(self, Some(file.clone()), op, buf)
    }

    /// Makes the file's data and metadata durable (`fsync`), as far as written before now.
    pub fn fsync(&self, file: &File) -> Request<'_, ()> {
        self.ranged(Kind::Fsync, file, 0, 0)
    }

    /// Makes the file's data durable, and the metadata needed to read it (`fdatasync`): that of
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

    /// Asks the kernel to read `len` bytes at `offset` into its page cache soon.
    pub fn will_need(&self, file: &File, offset: u64, len: u64) -> Request<'_, ()> {
        self.ranged(Kind::WillNeed, file, offset, len)
    }

    /// Does nothing, by way of the kernel: the cost of the engine itself.
    pub fn nop(&self) -> Request<'_, ()> {
        let (ptr, len) = (std::ptr::null_mut(), 0);
        let op = Op { kind: Kind::Nop, direct: false, fd: -1, ptr, len, offset: 0 };
        Request::new(self, None, op, ())
    }

    fn ranged(&self, kind: Kind, file: &File, offset: u64, len: u64) -> Request<'_, ()> {
        let op = Op { len, ..transfer(kind, file, std::ptr::null_mut(), 0, offset) };
        Request::new(self, Some(file.clone()), op, ())
    }

    /// Holds requests back until the returned guard (and every other) drops.
    pub fn plug(&self) -> Plug<'_> {
        Plug::new(self)
    }

    /// Submits one batch of pending requests, reaps within the budget, delivers.
    ///
    /// Never blocks. Call it when the [descriptor](AsFd) is readable, or in the caller's loop.
    /// Inside a callback it delivers nothing: what it reaps is delivered once the callback is
    /// over, so that callbacks which turn the engine do not pile up on the stack.
    pub fn turn(&self) -> Turn {
        self.core.turn(!self.core.dispatching.get())
    }

    /// As [`turn`](Self::turn), but sleeps until at least one completion was delivered, `timeout`
    /// is over, or nothing is left to wait for. Signals do not end it.
    ///
    /// Inside a callback it delivers too: other callbacks then run inside this one.
    ///
    /// # Errors
    ///
    /// The kernel's, when it refuses to wait; requests stay as they are.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Turn> {
        self.core.wait(timeout, None)
    }

    /// Turns the engine until nothing is pending or in flight.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn drain(&self) -> io::Result<()> {
        self.core.drain()
    }

    /// Refuses new requests, then drains: everything accepted is delivered before it returns.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn shutdown(&self) -> io::Result<()> {
        self.core.state.borrow_mut().closed = true;
        self.core.drain()
    }

    /// Runs a future on this thread, turning the engine while it waits.
    ///
    /// Other threads may wake the future. Allocates once per call.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait); the future is dropped.
    pub fn block_on<F: Future>(&self, future: F) -> io::Result<F::Output> {
        let core = &self.core;
        let alarm = Arc::new(Alarm {
            rung: AtomicBool::new(true),
            kick: Arc::clone(core.doorbell.foreign_kick()),
        });
        let waker = Waker::from(alarm_waker(&alarm));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        loop {
            // Ordering: Acquire pairs with the Release in `Alarm::ring`; it carries whatever the
            // waking thread wrote before it woke us.
            if alarm.rung.swap(false, Ordering::Acquire) {
                if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                    return Ok(output);
                }
            }
            // Also when the future has woken itself: the I/O goes on meanwhile.
            core.wait(None, Some(&alarm))?;
        }
    }

    /// The counters so far; allocates the copy.
    pub fn stats(&self) -> EngineStats {
        self.core.state.borrow().stats.clone()
    }

    /// Checks the engine's books, and says what it holds: tests and fuzz targets call it after
    /// every step.
    ///
    /// # Panics
    ///
    /// Panics with the name of the invariant that does not hold.
    #[doc(hidden)]
    pub fn validate(&self) -> Turn {
        let core = &self.core;
        let state = core.state.borrow();
        state.validate();
        let between_calls = !core.dispatching.get();
        if between_calls && state.needs_retry() && !state.has_work() {
            assert!(core.doorbell.retry_armed(), "blocked for ever");
        }
        let pending = state.pending() + state.ready();
        Turn { delivered: 0, pending, in_flight: state.in_flight() }
    }
}

fn transfer(kind: Kind, file: &File, ptr: *mut u8, len: usize, offset: u64) -> Op {
    let direct = file.alignment().is_some();
    Op { kind, direct, fd: file.as_fd().as_raw_fd(), ptr, len: len as u64, offset }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // During a panic no user code runs; what is in flight is waited for by `State::drop`.
        if !panicking() {
            // An error leaves requests undelivered; `State::drop` waits for them or leaks them.
            let _ = self.shutdown();
        }
        self.core.state.borrow_mut().closed = true;
    }
}

/// Readable when the engine wants a [`turn`](Engine::turn): a completion is there, work was left
/// over, or a retry is due. Level-triggered; never read from it.
impl AsFd for Engine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let core = &self.core;
        let fd = core.doorbell.fd();
        if core.state.borrow().has_work() {
            core.doorbell.kick(); // left over from when nobody watched
        }
        fd
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Engine");
        debug.field("backend", &self.core.kind);
        if let Ok(state) = self.core.state.try_borrow() {
            debug.field("pending", &state.pending()).field("in_flight", &state.in_flight());
        }
        debug.finish_non_exhaustive()
    }
}

/// Wakes a `block_on` from any thread.
pub(crate) struct Alarm {
    rung: AtomicBool,
    kick: Arc<OwnedFd>,
}

impl Alarm {
    fn ring(&self) {
        // Ordering: Release pairs with the Acquire in `block_on`; it carries the waker's writes.
        // The flag is set before the eventfd, so whoever is woken by the eventfd sees it.
        if !self.rung.swap(true, Ordering::Release) {
            sys::signal(&self.kick);
        }
    }

    fn is_rung(&self) -> bool {
        // Ordering: Relaxed; `block_on` acquires before it acts on it.
        self.rung.load(Ordering::Relaxed)
    }
}

/// `Wake` wants std's `Arc`, whatever the facade's is.
struct AlarmWaker(Arc<Alarm>);

fn alarm_waker(alarm: &Arc<Alarm>) -> std::sync::Arc<AlarmWaker> {
    std::sync::Arc::new(AlarmWaker(Arc::clone(alarm)))
}

impl Wake for AlarmWaker {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.ring();
    }

    fn wake_by_ref(self: &std::sync::Arc<Self>) {
        self.0.ring();
    }
}

pub(crate) struct Core {
    state: RefCell<State>,
    doorbell: Doorbell,
    kind: BackendKind,
    fallbacks: Vec<Fallback>,
    plugs: Cell<usize>,
    /// A callback or wake-up is running further up this stack.
    dispatching: Cell<bool>,
}

impl Core {
    pub(crate) fn is_closed(&self) -> bool {
        self.state.borrow().closed
    }

    pub(crate) fn reserve(&self) -> Option<Index> {
        self.state.borrow_mut().slab.alloc()
    }

    /// Queues what was reserved.
    pub(crate) fn queue(
        &self,
        index: Index,
        file: Option<File>,
        op: Op,
        zero_fill: bool,
        front: Front,
        cargo: Cargo,
    ) {
        self.state.borrow_mut().queue(index, file, op, zero_fill, front, cargo);
    }

    pub(crate) fn plug(&self) {
        self.plugs.set(self.plugs.get() + 1);
    }

    pub(crate) fn unplug(&self) {
        self.plugs.set(self.plugs.get() - 1);
        if panicking() {
            self.doorbell.kick();
        } else {
            self.flush_unless_held();
        }
    }

    /// Submits and reaps, unless a plug holds requests back or a callback is running: then the
    /// call that delivers it (or the kick it arms) goes on.
    pub(crate) fn flush_unless_held(&self) {
        if self.plugs.get() == 0 && !self.dispatching.get() {
            self.round(true);
        }
    }

    /// One submission, one reap, delivery; returns the completions delivered.
    ///
    /// It does not loop: a device that completes inside submit would keep it here for ever.
    fn round(&self, deliver: bool) -> usize {
        {
            let mut state = self.state.borrow_mut();
            state.submit();
            if state.reap() {
                self.doorbell.progress();
            }
        }
        let _rearm = Rearm(self); // also when a callback panics
        if deliver { self.dispatch() } else { 0 }
    }

    /// Delivers what is ready now. User code runs here, with nothing borrowed.
    ///
    /// What becomes ready meanwhile is left: a callback that always makes another request which
    /// needs no kernel would keep it here for ever.
    fn dispatch(&self) -> usize {
        let outermost = !self.dispatching.replace(true);
        let _guard = Dispatching { core: self, outermost };
        let ready = self.state.borrow().ready();
        for delivered in 0..ready {
            // The borrow ends with this statement.
            let next = self.state.borrow_mut().deliver();
            match next {
                None => return delivered, // a callback waited and delivered the rest
                Some(Delivery::Cargo(cargo, result)) => cargo.deliver(result),
                Some(Delivery::Wake(waker)) => waker.wake(),
                Some(Delivery::Silent) => {}
            }
        }
        ready
    }

    fn turn(&self, deliver: bool) -> Turn {
        self.doorbell.answer();
        self.state.borrow_mut().backend.acknowledge();
        let delivered = self.round(deliver);
        let state = self.state.borrow();
        let pending = state.pending() + state.ready();
        Turn { delivered, pending, in_flight: state.in_flight() }
    }

    /// With an alarm, its ringing ends the wait, and an idle engine does not.
    pub(crate) fn wait(
        &self,
        timeout: Option<Duration>,
        alarm: Option<&Alarm>,
    ) -> io::Result<Turn> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let turn = self.turn(true);
            // `turn` may have taken the alarm's kick, so its flag is looked at between that and
            // the sleep.
            if turn.delivered > 0 || alarm.map_or(turn.is_idle(), Alarm::is_rung) {
                return Ok(turn);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(turn);
            }
            self.sleep(left, alarm.is_some())?;
        }
    }

    /// Sleeps until a turn may get somewhere; returns early at will.
    fn sleep(&self, timeout: Option<Duration>, for_kick: bool) -> io::Result<()> {
        let mut state = self.state.borrow_mut();
        if state.has_work() {
            return Ok(());
        }
        if state.in_kernel() > 0 && !for_kick {
            return state.wait(timeout);
        }
        if state.in_kernel() > 0 {
            state.stats.waits += 1;
            state.backend.before_sleep();
        }
        drop(state);
        self.doorbell.wait(timeout)
    }

    fn drain(&self) -> io::Result<()> {
        while !self.wait(None, None)?.is_idle() {}
        Ok(())
    }

    pub(crate) fn is_done(&self, index: Index) -> bool {
        self.state.borrow().slab.peek(index).state == SlotState::Done
    }

    /// Frees a slot whose result is there and hands both out; `None` if it is not there yet.
    pub(crate) fn collect_done(&self, index: Index) -> Option<(Cargo, io::Result<usize>)> {
        let mut state = self.state.borrow_mut();
        (state.slab.peek(index).state == SlotState::Done).then(|| state.collect(index))
    }

    /// Stores who is to be woken; false if the result is there after all.
    pub(crate) fn register_waker(&self, index: Index, waker: &Waker) -> bool {
        // Cloning and dropping a waker is user code: not under the borrow. It may turn the engine.
        let waker = waker.clone();
        let mut state = self.state.borrow_mut();
        let slot = state.slab.get(index);
        if slot.state == SlotState::Done {
            drop(state);
            return false;
        }
        let old = slot.waker.replace(waker);
        drop(state);
        drop(old);
        true
    }

    /// The operation is gone: the request keeps its buffer until it completes.
    pub(crate) fn orphan(&self, index: Index) {
        let mut state = self.state.borrow_mut();
        let slot = state.slab.get(index);
        let waker = slot.waker.take();
        let cargo = if slot.state == SlotState::Done {
            Some(state.collect(index))
        } else {
            slot.front = Front::Orphan;
            None
        };
        drop(state);
        drop((waker, cargo)); // user code
    }
}

/// Sees to it that what is left over gets its turn: kicks, or arms the retry timer.
struct Rearm<'c>(&'c Core);

impl Drop for Rearm<'_> {
    fn drop(&mut self) {
        let state = self.0.state.borrow(); // user code never runs under a borrow
        if state.has_work() {
            self.0.doorbell.kick();
        } else if state.needs_retry() {
            self.0.doorbell.retry_later();
        }
    }
}

/// Ends a dispatch, also when a callback panics.
struct Dispatching<'c> {
    core: &'c Core,
    outermost: bool,
}

impl Drop for Dispatching<'_> {
    fn drop(&mut self) {
        if self.outermost {
            self.core.dispatching.set(false);
        }
    }
}
