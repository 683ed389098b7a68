//! The engine driven by bytes and compared with a model after every step: on the scripted device, on a
//! simulated one, and on the real backends.
//!
//! The property tests, the fuzz target and the stress test share it. The model has the bytes of the file, the
//! parts that requests read or write, the completed requests, and the futures that wait for a slot.
//! Concurrent requests never conflict, so the bytes do not depend on the order of completions. Callbacks
//! use the engine, and some panic.
#![allow(dead_code, reason = "not every program uses all devices")]

mod image;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use aio_reap::{
    AlignedBuf, AllocateMode, BackendKind, BufList, CompletionQueue, Engine, File, IoBuf, IoBufMut,
    Operation, Plug, ReapMode, Request, RequestId, Submission, Turn,
};
use aio_reap_test::Build;
use aio_reap_test::sim::{Cancel, Faults, Model, Script, Service, Sim, SubmitStep, Transfer};
use testkit::{TestTask, WakeCount};

use crate::readable::{assert_quiet, readable};
use image::{Access, FRESH, Image, Kind};

/// The bytes in a freed buffer.
const FREED: u8 = 0xdd;
/// Much longer than any wait for a notification.
const PATIENCE: Duration = Duration::from_secs(60);
const LATER: Duration = Duration::from_secs(3600);
/// The blocks in a cell of a direct file on a real backend, so that a request moves up to 32 KiB.
const KERNEL_BLOCKS: usize = 16;

/// The device below the engine.
pub(crate) enum Device {
    /// The input decides what it does.
    Script(Script),
    /// Its faults are random and not counted, and its clock is virtual.
    Sim(Sim),
    Kernel(BackendKind),
}

impl Device {
    fn script(&self) -> Option<&Script> {
        match self {
            Self::Script(script) => Some(script),
            Self::Sim(_) | Self::Kernel(_) => None,
        }
    }

    fn is_kernel(&self) -> bool {
        matches!(self, Self::Kernel(_))
    }
}

/// Returns a simulated device on which requests find no room, fail, end early or are retried. `seed` chooses
/// how often, and the time of a request.
pub(crate) fn faulty(seed: u64) -> Device {
    let rate = |shift: u32| ((seed >> shift) & 3) as u32 * 100_000;
    let faults = Faults {
        busy: rate(0),
        partial: rate(2),
        refused: rate(1) / 2,
        failed: rate(3) / 4,
        again: rate(4),
        short: rate(5),
    };
    let service = [
        Service::Fixed(50_000),
        Service::Exponential(50_000),
        Service::Bursty { fast: 10_000, slow: 90_000, run: 100 },
    ][seed as usize % 3];
    let inline = rate(6);
    let model = Model { servers: 8, service, faults, inline, moves_data: true, ..Model::default() };
    Device::Sim(Sim::new(model, seed))
}

/// Runs one input on a scripted device. Returns the number of steps.
///
/// # Panics
///
/// Panics if the engine breaks an invariant.
pub(crate) fn run(input: &[u8]) -> usize {
    run_on(Device::Script(Script::new()), Path::new("/dev/shm"), input)
}

/// Runs one input. A file for `O_DIRECT` is in `folder`. Returns the number of steps.
///
/// # Panics
///
/// Panics if the engine breaks an invariant.
pub(crate) fn run_on(device: Device, folder: &Path, input: &[u8]) -> usize {
    let mut input = Input(input);
    let [depth, capacity, mode, file] = input.array();
    let depth = 1 + usize::from(depth % if depth < 192 { 8 } else { 32 });
    let builder = Engine::builder()
        .depth(depth)
        .capacity(depth + usize::from(capacity % 24))
        .reap_mode(if mode % 4 == 3 { ReapMode::OnTurn } else { ReapMode::AfterSubmit });
    let engine = match &device {
        Device::Script(script) => builder.build_sim(script),
        Device::Sim(sim) => builder.build_sim(sim),
        Device::Kernel(kind) => builder.backend(*kind).build(),
    };
    let engine = Rc::new(engine.unwrap());
    let blocks = if device.is_kernel() { KERNEL_BLOCKS } else { 1 };
    let (image, raw) = Image::new((file % 4 == 3).then_some((folder, blocks)));
    let world = World::new(&engine, device, image, raw, depth, mode & 32 == 0);
    // Each call of `as_fd` looks for work, so an event loop makes one call. Half of the inputs leave it
    // to a later step.
    let mut fd = (mode & 16 == 0).then(|| engine.as_fd());
    let (mut plugs, mut waiting) = (Vec::new(), Vec::new());
    let mut steps = 0;
    while !input.0.is_empty() {
        let step = input.array();
        steps += 1;
        world
            .catching(&engine, fd, || world.step(&engine, &mut fd, &mut plugs, &mut waiting, step));
        world.empty_queues();
        world.check(&engine);
        assert_eq!(engine.stats().accepted, world.accepted.get());
        if let (Some(fd), true) = (fd, plugs.is_empty() && world.must_notify(&engine)) {
            // It becomes readable at once, or after the delay of a retry.
            assert!(readable(fd, PATIENCE), "no turn would follow");
        }
    }
    world.catching(&engine, fd, || drop(plugs));
    match world.fuel.get() % 3 {
        0 => {
            while !world.catching(&engine, fd, || engine.shutdown().unwrap()) {}
            assert!(world.check(&engine).is_idle());
            assert!(engine.nop().submit().is_err());
            world.turn(&engine);
            for mut one in waiting {
                assert!(one.is_woken(), "a future sleeps behind the shutdown");
                assert!(matches!(one.task.poll(), Poll::Ready(Err(_))));
            }
        }
        1 if !matches!(world.device, Device::Sim(_)) => world.turn_by_events(&engine, fd, waiting),
        _ => drop(waiting),
    }
    // A panic of a callback inside the drop of the engine would abandon the other callbacks.
    world.is_calm.set(true);
    world.catching(&engine, fd, || _ = engine.turn());
    drop(engine);
    world.end();
    steps
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    /// Returns the next bytes, or zeros past the end.
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let count = N.min(self.0.len());
        let (head, rest) = self.0.split_at(count);
        array[..count].copy_from_slice(head);
        self.0 = rest;
        array
    }
}

thread_local! {
    /// Set while a panic unwinds that the model raised itself.
    static IS_UNWINDING: Cell<bool> = const { Cell::new(false) };
}

/// The value of a panic that the model raises itself. No hook reports it.
struct OnPurpose;

fn unwind() -> ! {
    IS_UNWINDING.set(true);
    resume_unwind(Box::new(OnPurpose))
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    access: Access,
    /// Its result was delivered, or its operation was dropped and its buffer was freed.
    done: bool,
    /// It may end with ECANCELED.
    cancelled: bool,
    /// It may end with ETIMEDOUT.
    timed: bool,
    /// No result is expected: the engine does not have the request, or it has no buffer and its
    /// operation was dropped.
    ignored: bool,
}

/// A future that waits for a slot.
struct Waiting<'e> {
    id: usize,
    task: TestTask<Submission<'e, ()>>,
}

impl Waiting<'_> {
    fn is_woken(&self) -> bool {
        self.task.wakes() > 0
    }
}

struct World {
    engine: Weak<Engine>,
    device: Device,
    depth: usize,
    /// No request has a deadline, and no other thread sends a call. So only completions end a sleep.
    is_plain: bool,
    file: File,
    image: Image,
    ledger: RefCell<Vec<Entry>>,
    plain: Held<Buf>,
    lists: Held<BufList<Buf>>,
    others: Held<()>,
    /// The requests with a callback or a queue.
    ids: RefCell<Vec<(usize, RequestId)>>,
    /// The operations without a buffer that a panic would drop, the innermost last.
    at_risk: RefCell<Vec<usize>>,
    /// The bytes of freed buffers of requests whose operation was dropped.
    freed: RefCell<BTreeMap<usize, Vec<u8>>>,
    accepted: Cell<u64>,
    /// The number of EIO errors that the device may still return.
    failures: Cell<u64>,
    /// The number of requests that callbacks may still make.
    fuel: Cell<u32>,
    /// The number of callbacks that have run.
    reactions: Cell<u64>,
    /// The number of callbacks on the stack.
    running: Cell<u32>,
    /// Set during a submission for a later turn, in which no callback may run.
    is_silent: Cell<bool>,
    /// Set when callbacks and calls must not panic any more.
    is_calm: Cell<bool>,
    /// Set if a future waited for a slot without a wake-up when this step began. Then no slot was free.
    is_full: Cell<bool>,
    /// The number of calls sent to [`Engine::remote`].
    calls: Cell<u64>,
    calls_run: Arc<AtomicU64>,
    /// The number of buffers that exist.
    buffers: Cell<usize>,
    /// The device refuses cancellations.
    refuses: Cell<bool>,
    /// The engine was dropped.
    ended: Cell<bool>,
}

/// The operations, and the queue of completions, of the requests with one kind of buffer.
struct Held<B: 'static> {
    operations: RefCell<Vec<(usize, Operation<B>)>>,
    done: CompletionQueue<B>,
}

impl<B> Default for Held<B> {
    fn default() -> Self {
        Self { operations: RefCell::default(), done: CompletionQueue::new() }
    }
}

/// The buffer of a request, or a part of it.
struct Buf {
    id: usize,
    bytes: AlignedBuf,
    world: Rc<World>,
}

// SAFETY: it returns the memory of the buffer inside, which no code uses while the engine has the
// value.
unsafe impl IoBuf for Buf {
    fn as_ptr(&self) -> *const u8 {
        IoBuf::as_ptr(&self.bytes)
    }

    fn len(&self) -> usize {
        IoBuf::len(&self.bytes)
    }
}

// SAFETY: it returns the memory of the buffer inside, which is valid for writing.
unsafe impl IoBufMut for Buf {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        IoBufMut::as_mut_ptr(&mut self.bytes)
    }
}

/// The buffers of a request, or none.
trait Buffers: Sized + 'static {
    /// The drop of a buffer whose operation was dropped settles its request.
    const SETTLES: bool = true;

    fn parts(&self) -> &[Buf];
    fn held(world: &World) -> &Held<Self>;

    fn bytes(&self) -> Vec<u8> {
        self.parts().iter().map(|buf| &buf.bytes[..]).collect::<Vec<_>>().concat()
    }
}

impl Buffers for Buf {
    fn parts(&self) -> &[Buf] {
        std::slice::from_ref(self)
    }

    fn held(world: &World) -> &Held<Self> {
        &world.plain
    }
}

impl Buffers for BufList<Buf> {
    fn parts(&self) -> &[Buf] {
        self
    }

    fn held(world: &World) -> &Held<Self> {
        &world.lists
    }
}

impl Buffers for () {
    const SETTLES: bool = false;

    fn parts(&self) -> &[Buf] {
        &[]
    }

    fn held(world: &World) -> &Held<Self> {
        &world.others
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let world = &self.world;
        world.buffers.set(world.buffers.get() - 1);
        let entry = world.ledger.borrow()[self.id];
        let is_failure = std::thread::panicking() && !IS_UNWINDING.get();
        if !entry.done && !entry.ignored && !is_failure {
            // The operation was dropped: the engine frees the buffers after the completion.
            let mut freed = world.freed.borrow_mut();
            let bytes = freed.entry(self.id).or_default();
            bytes.extend_from_slice(&self.bytes);
            if bytes.len() == entry.access.len {
                let bytes = freed.remove(&self.id).unwrap_or_default();
                drop(freed);
                world.settle(self.id, None, &bytes);
            }
        }
        self.bytes.fill(FREED); // a device that still writes from this buffer spoils the file
    }
}

impl World {
    fn new(
        engine: &Rc<Engine>,
        device: Device,
        image: Image,
        raw: std::fs::File,
        depth: usize,
        is_plain: bool,
    ) -> Rc<Self> {
        let failures = if matches!(device, Device::Sim(_)) { u64::MAX } else { 0 };
        Rc::new(Self {
            engine: Rc::downgrade(engine),
            device,
            depth,
            is_plain,
            file: engine.attach(raw).unwrap(),
            image,
            ledger: RefCell::default(),
            plain: Held::default(),
            lists: Held::default(),
            others: Held::default(),
            ids: RefCell::default(),
            at_risk: RefCell::default(),
            freed: RefCell::default(),
            accepted: Cell::new(0),
            failures: Cell::new(failures),
            fuel: Cell::new(300),
            reactions: Cell::new(0),
            running: Cell::new(0),
            is_silent: Cell::new(false),
            is_calm: Cell::new(false),
            is_full: Cell::new(false),
            calls: Cell::new(0),
            calls_run: Arc::default(),
            buffers: Cell::new(0),
            refuses: Cell::new(false),
            ended: Cell::new(false),
        })
    }

    /// Makes the step that the first byte chooses. The other bytes are its arguments.
    fn step<'e>(
        self: &Rc<Self>,
        engine: &'e Engine,
        fd: &mut Option<BorrowedFd<'e>>,
        plugs: &mut Vec<Plug<'e>>,
        waiting: &mut Vec<Waiting<'e>>,
        [what, a, b, c]: [u8; 4],
    ) {
        self.is_full.set(!waiting.iter().all(Waiting::is_woken));
        match (what % 16, self.device.script()) {
            (0..=4, _) | (11..=14, None) => self.submit(engine, [what, a, b, c]),
            (5, _) => plugs.push(engine.plug()),
            (6 | 7, _) => drop(plugs.pop()),
            (8, _) => self.turn(engine),
            (9, _) if a < 64 => _ = engine.wait(None).unwrap(),
            (9 | 10, _) if a >= 192 => self.use_waiting(engine, waiting, a, b),
            (9 | 10, _) => self.use_operation(a, b),
            (11, Some(script)) => self.script_submission(script, a, b),
            (12 | 13, Some(script)) => self.script_transfer(script, a, b),
            (14, Some(script)) if a % 2 == 0 => _ = script.complete(usize::from(b % 8)),
            (14, Some(script)) => _ = script.complete_nth(usize::from(b % 8)),
            (15, _) if a < 16 => engine.drain().unwrap(),
            (15, Some(script)) if a < 32 => {
                let how = [Cancel::Works, Cancel::TooLate, Cancel::Refused][usize::from(b % 3)];
                self.refuses.set(how == Cancel::Refused);
                script.cancels(how);
            }
            (15, _) if a < 48 => self.cancel_ids(engine),
            (15, _) if a < 80 => self.call(engine, b),
            (15, _) if a < 96 => {
                let _plug = engine.plug(); // the panic drops it, perhaps as the last one
                self.submit(engine, [b, b, c, a]);
                unwind();
            }
            (15, Some(script)) if a < 128 => script.ring(),
            _ => _ = fd.get_or_insert_with(|| engine.as_fd()),
        }
    }

    /// Runs a part of the program, in which callbacks may panic on purpose. Each panic causes a turn.
    /// Returns false after a panic.
    fn catching(&self, engine: &Engine, fd: Option<BorrowedFd<'_>>, part: impl FnOnce()) -> bool {
        let mut ended = catch_unwind(AssertUnwindSafe(part));
        let quiet = ended.is_ok();
        while let Err(panic) = ended {
            if !panic.is::<OnPurpose>() {
                resume_unwind(panic);
            }
            IS_UNWINDING.set(false);
            self.is_silent.set(false);
            self.running.set(0);
            for id in self.at_risk.take() {
                self.ledger.borrow_mut()[id].ignored = true;
            }
            engine.validate();
            if let (Some(fd), Device::Script(_) | Device::Kernel(_)) = (fd, &self.device) {
                assert!(readable(fd, Duration::ZERO), "no turn follows the panic");
            }
            ended = catch_unwind(AssertUnwindSafe(|| _ = engine.turn()));
        }
        quiet
    }

    /// Returns whether the descriptor must become readable by itself.
    fn must_notify(&self, engine: &Engine) -> bool {
        let counts = engine.validate();
        let calls = self.has_calls();
        match &self.device {
            Device::Script(script) => {
                let can_submit = counts.pending > 0 && counts.in_flight < self.depth;
                calls || can_submit || script.visible() > 0
            }
            Device::Sim(_) => false,
            Device::Kernel(_) => calls || !counts.is_idle(),
        }
    }

    fn has_calls(&self) -> bool {
        self.calls.get() > self.calls_run.load(Ordering::Relaxed)
    }

    /// Turns the engine outside of callbacks.
    fn turn(&self, engine: &Engine) {
        let calls = self.calls.get();
        let turn = engine.turn();
        assert!(self.calls_run.load(Ordering::Relaxed) >= calls, "calls are left");
        let counts = engine.validate();
        assert_eq!(turn.pending + turn.in_flight, counts.pending + counts.in_flight);
        if let Some(script) = self.device.script() {
            let calls = script.batches().len();
            if counts.in_flight == self.depth && engine.turn().delivered == 0 {
                assert_eq!(script.batches().len(), calls, "submits without room");
            }
        }
    }

    /// Makes one request. `front` chooses how its result is delivered, and `what` its kind.
    fn submit(self: &Rc<Self>, engine: &Engine, [front, what, cell, size]: [u8; 4]) {
        let unit = self.image.cell;
        let mut at = usize::from(cell) % 66 * unit;
        let mut len = unit * (1 + usize::from(size % 4));
        if size % 32 == 31 {
            len = 0;
        } else if !self.image.is_direct {
            at += usize::from(size >> 4);
            len -= usize::from(what >> 4);
        }
        let fits = at + len <= self.image.len;
        let kind = match what % 8 {
            0..=2 => Kind::Read { zero_fill: what & 8 != 0 },
            3..=5 if fits => Kind::Write,
            6 if fits && len > 0 => Kind::Punch,
            _ => Kind::Other,
        };
        let mut access = Access { kind, at, len };
        if kind != Kind::Other && !self.image.lock(&access) {
            access.kind = Kind::Other;
        }
        let id = self.add_entry(access);
        // Three of eight requests go to a callback or a queue, the others to an operation.
        let (front, is_list) = ((front / 16).wrapping_add(front) % 8, (front ^ size) & 16 != 0);
        let request = (front, id, size);
        match access.kind {
            Kind::Read { zero_fill } if is_list => {
                let list = self.list(id, &vec![FRESH; len]);
                let read = engine.read_vectored(&self.file, list, at as u64);
                self.submit_by(if zero_fill { read.zero_fill() } else { read }, request);
            }
            Kind::Read { zero_fill } => {
                let read = engine.read(&self.file, self.buf(id, &vec![FRESH; len]), at as u64);
                self.submit_by(if zero_fill { read.zero_fill() } else { read }, request);
            }
            Kind::Write => {
                let bytes: Vec<u8> = (0..len).map(|i| (i * 13 + i / 256 + id * 31) as u8).collect();
                if is_list {
                    let list = self.list(id, &bytes);
                    self.submit_by(engine.write_vectored(&self.file, list, at as u64), request);
                } else {
                    let buf = self.buf(id, &bytes);
                    self.submit_by(engine.write(&self.file, buf, at as u64), request);
                }
            }
            Kind::Punch => {
                let punch = AllocateMode::PunchHole;
                let punch = engine.allocate(&self.file, punch, at as u64, len as u64);
                self.submit_by(punch, (front % 3, id, size)); // not as a future
            }
            Kind::Other if what & 0x30 != 0 => self.submit_by(engine.nop(), request),
            Kind::Other => self.submit_by(engine.fdatasync(&self.file), request),
        }
    }

    fn add_entry(&self, access: Access) -> usize {
        let mut ledger = self.ledger.borrow_mut();
        let (done, cancelled, timed, ignored) = (false, false, false, false);
        ledger.push(Entry { access, done, cancelled, timed, ignored });
        ledger.len() - 1
    }

    fn buf(self: &Rc<Self>, id: usize, bytes: &[u8]) -> Buf {
        self.buffers.set(self.buffers.get() + 1);
        let align = if self.image.is_direct { self.image.cell } else { 1 };
        let mut own = AlignedBuf::zeroed(bytes.len(), align);
        own.copy_from_slice(bytes);
        Buf { id, bytes: own, world: Rc::clone(self) }
    }

    /// Copies bytes into a list of buffers, some of which are empty.
    fn list(self: &Rc<Self>, id: usize, bytes: &[u8]) -> BufList<Buf> {
        let lens: &[usize] = if self.image.is_direct { &[self.image.cell] } else { &[7, 0, 1, 40] };
        let (mut parts, mut rest) = (Vec::new(), bytes);
        for len in lens.iter().cycle().skip(id % 4) {
            let (part, behind) = rest.split_at(rest.len().min(*len));
            parts.push(self.buf(id, part));
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        BufList::new(parts).ok().expect("few parts")
    }

    /// Submits a request. `front` chooses how its result is delivered. `then` chooses its deadline, and
    /// what its callback does.
    fn submit_by<B: Buffers>(
        self: &Rc<Self>,
        request: Request<'_, B>,
        (front, id, then): (u8, usize, u8),
    ) {
        let timing = if self.is_plain { 0 } else { then >> 4 };
        let request = match timing {
            7 => request.cancel_at(Instant::now()),
            8 | 9 => request.cancel_at(Instant::now() + LATER),
            _ => request,
        };
        self.ledger.borrow_mut()[id].timed = timing == 7;
        self.accepted.set(self.accepted.get() + 1);
        let is_full = self.running.get() == 0 && self.is_full.get();
        let done = {
            let world = Rc::clone(self);
            move |result, buf: B| {
                world.running.set(world.running.get() + 1);
                world.settle(id, Some(&result), &buf.bytes());
                drop(buf);
                world.react(then);
                world.running.set(world.running.get() - 1);
            }
        };
        let refused = match front {
            0 => self.keep_id(id, request.callback(done)).err(),
            1 => self.keep_id(id, request.enqueue(&B::held(self).done, id as u64)).err(),
            2 => {
                let before = self.is_silent.replace(true);
                let accepted = self.keep_id(id, request.callback_on_turn(done));
                self.is_silent.set(before);
                accepted.err()
            }
            _ => {
                let submitted = self.risking(id, B::SETTLES, || request.submit());
                let keep = |operation| B::held(self).operations.borrow_mut().push((id, operation));
                submitted.map(keep).err()
            }
        };
        if let Some(refused) = refused {
            self.accepted.set(self.accepted.get() - 1);
            self.ledger.borrow_mut()[id].ignored = true;
            let entry = self.ledger.borrow()[id];
            assert!(!entry.done, "refused and delivered");
            self.image.unlock(&entry.access);
            let buf = refused.into_request().into_buf();
            assert!(buf.parts().iter().all(|part| part.id == id));
        } else {
            assert!(!is_full, "it takes the slot of a future that waits");
        }
    }

    fn keep_id<E>(&self, entry: usize, accepted: Result<RequestId, E>) -> Result<(), E> {
        accepted.map(|id| self.ids.borrow_mut().push((entry, id)))
    }

    /// Runs code that owns an operation, which is dropped if the code panics.
    fn risking<T>(&self, id: usize, settles: bool, code: impl FnOnce() -> T) -> T {
        if settles {
            return code();
        }
        self.at_risk.borrow_mut().push(id);
        let value = code();
        self.at_risk.borrow_mut().pop();
        value
    }

    /// The actions of a callback after it has checked its result.
    fn react(self: &Rc<Self>, how: u8) {
        assert!(!self.ended.get(), "a callback after the end");
        assert!(!self.is_silent.get(), "a callback during a submission for a later turn");
        assert!(!std::thread::panicking(), "a callback during a panic");
        self.reactions.set(self.reactions.get() + 1);
        let Some(engine) = self.engine.upgrade() else { return };
        self.check(&engine);
        let fuel = self.fuel.get();
        if fuel == 0 {
            return;
        }
        self.fuel.set(fuel - 1);
        match how / 8 % 12 {
            0 | 1 => self.submit(&engine, [how, how.rotate_left(3), fuel as u8, how ^ 0x5a]),
            2 => {
                let count = || (self.reactions.get(), self.calls_run.load(Ordering::Relaxed));
                let before = count();
                engine.turn(); // it may fill queues
                assert_eq!(before, count(), "callbacks nest though none waited");
            }
            3 => _ = engine.wait(None).unwrap(),
            4 | 5 => self.use_operation(how, how.rotate_left(2)),
            6 => {
                let _plug = engine.plug();
                self.submit(&engine, [0, how, fuel as u8, how ^ 0x33]);
                self.submit(&engine, [2, !how, fuel as u8 / 2, how]);
            }
            7 => self.empty_queues(),
            8 if fuel.is_multiple_of(8) => engine.drain().unwrap(),
            9 => self.call(&engine, how),
            10 if fuel.is_multiple_of(4) && !self.is_calm.get() => unwind(),
            _ => {}
        }
    }

    /// Sends a call, as another thread does. Some calls panic.
    fn call(&self, engine: &Engine, how: u8) {
        if self.is_plain {
            return;
        }
        let ran = Arc::clone(&self.calls_run);
        let panics = how.is_multiple_of(4) && !self.is_calm.get();
        let call = move |_: &Engine| {
            ran.fetch_add(1, Ordering::Relaxed);
            if panics {
                unwind();
            }
        };
        let sent = engine.remote().call(call).is_ok();
        self.calls.set(self.calls.get() + u64::from(sent));
    }

    /// Makes a future that waits for a slot, or polls or drops one.
    fn use_waiting<'e>(
        self: &Rc<Self>,
        engine: &'e Engine,
        waiting: &mut Vec<Waiting<'e>>,
        which: u8,
        how: u8,
    ) {
        if how.is_multiple_of(4) || waiting.is_empty() {
            let id = self.add_entry(Access { kind: Kind::Other, at: 0, len: 0 });
            let mut one = Waiting { id, task: TestTask::new(engine.nop().submit_async()) };
            if !self.poll_waiting(&mut one) {
                waiting.push(one);
            } else {
                assert!(!self.is_full.get(), "it takes the slot of a future that waits");
            }
            return;
        }
        let mut one = waiting.remove(usize::from(which) % waiting.len());
        if how % 4 == 1 {
            drop(one);
            return;
        }
        let nth = usize::from(which) % (waiting.len() + 1);
        let is_woken = one.is_woken();
        let is_ready = self.poll_waiting(&mut one);
        assert_eq!(is_ready, is_woken, "a future is woken if and only if there is a slot for it");
        if !is_ready {
            waiting.insert(nth, one);
        }
    }

    /// Returns whether the future has got a slot.
    fn poll_waiting(&self, one: &mut Waiting<'_>) -> bool {
        let id = one.id;
        self.accepted.set(self.accepted.get() + 1);
        self.ledger.borrow_mut()[id].ignored = false;
        match self.risking(id, false, || one.task.poll()) {
            Poll::Ready(submitted) => {
                let operation = submitted.expect("the engine is open");
                self.others.operations.borrow_mut().push((id, operation));
                true
            }
            Poll::Pending => {
                self.accepted.set(self.accepted.get() - 1);
                self.ledger.borrow_mut()[id].ignored = true;
                false
            }
        }
    }

    /// Ends everything as an event loop does that sleeps only on the engine's descriptor.
    fn turn_by_events<'e>(
        self: &Rc<Self>,
        engine: &'e Engine,
        fd: Option<BorrowedFd<'e>>,
        mut waiting: Vec<Waiting<'e>>,
    ) {
        let fd = fd.unwrap_or_else(|| engine.as_fd());
        loop {
            self.empty_queues();
            self.collect::<Buf>(false);
            self.collect::<BufList<Buf>>(false);
            self.collect::<()>(false);
            if let Some(nth) = waiting.iter().position(Waiting::is_woken) {
                let mut one = waiting.remove(nth);
                let poll = || {
                    assert!(self.poll_waiting(&mut one), "it was woken without a slot");
                };
                self.catching(engine, Some(fd), poll);
                continue;
            }
            if engine.validate().is_idle() && !self.has_calls() {
                break;
            }
            if let (Some(script), false) = (self.device.script(), self.must_notify(engine)) {
                script.complete(1);
            }
            assert!(readable(fd, PATIENCE), "no turn would follow");
            self.catching(engine, Some(fd), || self.turn(engine));
        }
        assert!(waiting.is_empty(), "a future waits for a slot, and all are free");
        assert_quiet(engine, fd);
    }

    /// Drops, polls or waits for an operation.
    fn use_operation(self: &Rc<Self>, which: u8, how: u8) {
        let counts = [
            self.plain.operations.borrow().len(),
            self.lists.operations.borrow().len(),
            self.others.operations.borrow().len(),
        ];
        let Some(nth) = usize::from(which).checked_rem(counts.iter().sum()) else { return };
        if nth < counts[0] {
            self.use_nth::<Buf>(nth, how);
        } else if nth < counts[0] + counts[1] {
            self.use_nth::<BufList<Buf>>(nth - counts[0], how);
        } else {
            self.use_nth::<()>(nth - counts[0] - counts[1], how);
        }
    }

    fn use_nth<B: Buffers>(self: &Rc<Self>, nth: usize, how: u8) {
        // Not on the list during the wait, which runs callbacks that use the list.
        let (id, mut operation) = B::held(self).operations.borrow_mut().swap_remove(nth);
        match how % 4 {
            0 => {
                self.ledger.borrow_mut()[id].ignored |= !B::SETTLES;
                drop(operation);
            }
            3 if how & 0x18 == 0 => {
                self.ledger.borrow_mut()[id].cancelled = true;
                operation.cancel();
                B::held(self).operations.borrow_mut().push((id, operation));
            }
            1 => {
                let (result, buf) = self.risking(id, B::SETTLES, || operation.wait());
                self.settle(id, Some(&result), &buf.bytes());
            }
            _ => match poll(&mut operation, how) {
                Poll::Ready((result, buf)) => self.settle(id, Some(&result), &buf.bytes()),
                Poll::Pending => B::held(self).operations.borrow_mut().push((id, operation)),
            },
        }
    }

    /// Cancels the requests with a callback or a queue.
    fn cancel_ids(&self, engine: &Engine) {
        let counts = engine.validate();
        let mut tried = 0;
        for (entry, id) in self.ids.borrow_mut().drain(..) {
            self.ledger.borrow_mut()[entry].cancelled = true;
            tried += usize::from(engine.cancel(id));
        }
        let most = if self.refuses.get() { 0 } else { counts.in_flight };
        assert!(tried <= counts.pending + most, "refused by the device and counted");
    }

    fn script_submission(&self, script: &Script, how: u8, size: u8) {
        let count = usize::from(size % 8);
        script.on_submit(match how % 4 {
            0 => SubmitStep::Accept(count),
            1 => SubmitStep::Again,
            2 => {
                self.failures.set(self.failures.get() + 1);
                SubmitStep::Refuse(count, libc::EIO)
            }
            _ => SubmitStep::Inline,
        });
    }

    fn script_transfer(&self, script: &Script, how: u8, size: u8) {
        // On a direct file less than a block is the end of the file.
        let short = match self.image.is_direct {
            true => self.image.cell + usize::from(size) * 4,
            false => usize::from(size % 48),
        };
        script.on_transfer(match how % 8 {
            0 | 1 => Transfer::Full,
            2..=4 => Transfer::Short(short),
            5 => Transfer::Fail(libc::EAGAIN),
            6 => Transfer::Fail(libc::EINTR),
            _ => {
                self.failures.set(self.failures.get() + 1);
                Transfer::Fail(libc::EIO)
            }
        });
    }

    fn empty_queues(&self) {
        self.empty::<Buf>();
        self.empty::<BufList<Buf>>();
        self.empty::<()>();
    }

    fn empty<B: Buffers>(&self) {
        while let Some(done) = B::held(self).done.pop() {
            let id = done.token as usize;
            assert!(done.buf.parts().iter().all(|part| part.id == id));
            self.settle(id, Some(&done.result), &done.buf.bytes());
        }
    }

    /// Takes the results of the operations that are done. If `all` is set, each must be done.
    fn collect<B: Buffers>(&self, all: bool) {
        for (id, operation) in B::held(self).operations.take() {
            if operation.is_done() {
                let (result, buf) = operation.wait();
                self.settle(id, Some(&result), &buf.bytes());
            } else {
                assert!(!all, "lost: {:?}", self.ledger.borrow()[id]);
                B::held(self).operations.borrow_mut().push((id, operation));
            }
        }
    }

    /// Checks that a request completes once, with the right bytes. `result` is `None` if its
    /// operation was dropped.
    fn settle(
        &self,
        id: usize,
        result: Option<&Result<usize, aio_reap::RequestError>>,
        bytes: &[u8],
    ) {
        let entry = {
            let mut ledger = self.ledger.borrow_mut();
            assert!(!ledger[id].done && !ledger[id].ignored, "delivered twice: {:?}", ledger[id]);
            ledger[id].done = true;
            ledger[id]
        };
        if let Some(Err(error)) = result {
            match error.errno() {
                libc::EAGAIN | libc::EINTR => {
                    assert!(!self.device.is_kernel(), "{error}: {entry:?}");
                }
                libc::ECANCELED => assert!(entry.cancelled, "{entry:?}"),
                libc::ETIMEDOUT => assert!(entry.timed, "{entry:?}"),
                libc::EIO => {
                    let left = self.failures.get().checked_sub(1);
                    self.failures.set(left.expect("more errors than the script caused"));
                }
                libc::EOPNOTSUPP => assert_eq!(entry.access.kind, Kind::Punch),
                _ => panic!("{error}"),
            }
            self.image.check_count(&entry.access, error.transferred(), bytes);
        }
        let moved = result.and_then(|result| result.as_ref().ok()).copied();
        self.image.complete(&entry.access, moved, bytes);
    }

    /// Checks that the numbers of the engine, the device and the model agree.
    fn check(&self, engine: &Engine) -> Turn {
        let turn = engine.validate();
        let in_device = match &self.device {
            Device::Script(script) => script.in_flight() + script.visible(),
            Device::Sim(sim) => sim.in_flight(),
            Device::Kernel(_) => turn.in_flight,
        };
        assert_eq!(turn.in_flight, in_device, "engine and device disagree on what is in flight");
        let stats = engine.stats();
        assert_eq!(stats.stray, 0);
        // The model counts a request before the engine takes it. So inside a callback that runs
        // during a submission, the model may have one request more for each call on the stack.
        assert!(stats.accepted <= self.accepted.get());
        turn
    }

    /// Checks after the drop of the engine that no request is lost and no buffer is left.
    fn end(&self) {
        self.empty_queues();
        match &self.device {
            Device::Script(script) => {
                assert_eq!(script.in_flight() + script.visible(), 0);
                assert!(script.batches().iter().all(|&size| size <= self.depth), "batch too large");
            }
            Device::Sim(sim) => assert_eq!(sim.in_flight(), 0),
            Device::Kernel(_) => {}
        }
        self.collect::<Buf>(true);
        self.collect::<BufList<Buf>>(true);
        self.collect::<()>(true);
        for entry in &*self.ledger.borrow() {
            assert!(entry.done || entry.ignored, "lost: {entry:?}");
        }
        assert_eq!(self.buffers.get(), 0, "buffers left");
        self.image.check_file();
        self.ended.set(true);
    }
}

/// Polls once, with one of several wakers.
fn poll<B: 'static>(operation: &mut Operation<B>, how: u8) -> Poll<aio_reap::Outcome<B>> {
    let counting = WakeCount::new().waker();
    let waker = if how & 4 == 0 { Waker::noop() } else { &counting };
    Pin::new(operation).poll(&mut Context::from_waker(waker))
}
