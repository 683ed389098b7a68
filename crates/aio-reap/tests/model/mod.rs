//! The engine on a scripted device, driven by bytes and compared with a model after every step.
//!
//! The property test and the fuzz target share it. The model has the bytes of the file, the parts
//! that requests read or write, and the completed requests. Concurrent requests never conflict, so
//! the bytes do not depend on the order of completions.

mod image;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

use aio_reap::{
    AllocateMode, CompletionQueue, Engine, File, IoBuf, IoBufMut, Operation, ReapMode, Request,
    RequestId, Turn,
};
use aio_reap_test::Build;
use aio_reap_test::sim::{Cancel, Script, SubmitStep, Transfer};

use image::{Access, CELL, FILE_LEN, FRESH, Image, Kind};

/// The bytes in a freed buffer.
const FREED: u8 = 0xdd;

/// Runs one input. Returns the number of steps.
///
/// # Panics
///
/// Panics if the engine breaks an invariant.
pub(crate) fn run(input: &[u8]) -> usize {
    let mut input = Input(input);
    let [depth, capacity, mode, _] = input.array();
    let depth = 1 + usize::from(depth % 8);
    let script = Script::new();
    let engine = Engine::builder()
        .depth(depth)
        .capacity(depth + usize::from(capacity % 24))
        .reap_mode(if mode % 4 == 3 { ReapMode::OnTurn } else { ReapMode::AfterSubmit })
        .build_sim(&script)
        .unwrap();
    let engine = Rc::new(engine);
    let world = World::new(&engine, script);
    let mut plugs = Vec::new();
    let mut steps = 0;
    while !input.0.is_empty() {
        let [what, a, b, c] = input.array();
        steps += 1;
        match what % 16 {
            0..=4 => world.submit(&engine, [what, a, b, c]),
            5 => plugs.push(engine.plug()),
            6 | 7 => drop(plugs.pop()),
            8 => {
                let turn = engine.turn();
                let counts = engine.validate();
                assert_eq!(turn.pending + turn.in_flight, counts.pending + counts.in_flight);
                let calls = world.script.batches().len();
                if counts.in_flight == depth && engine.turn().delivered == 0 {
                    assert_eq!(world.script.batches().len(), calls, "submits without room");
                }
            }
            9 if a < 64 => _ = engine.wait(None).unwrap(),
            9 | 10 => world.use_operation(a, b),
            11 => world.script_submission(a, b),
            12 | 13 => world.script_transfer(a, b),
            14 if a % 2 == 0 => _ = world.script.complete(usize::from(b % 8)),
            14 => _ = world.script.complete_nth(usize::from(b % 8)),
            _ if a < 16 => engine.drain().unwrap(),
            _ if a < 32 => {
                let how = [Cancel::Works, Cancel::TooLate, Cancel::Refused][usize::from(b % 3)];
                world.refuses.set(how == Cancel::Refused);
                world.script.cancels(how);
            }
            _ if a < 40 => world.cancel_ids(&engine),
            _ => world.script.ring(),
        }
        world.empty_queues();
        world.check(&engine);
        assert_eq!(engine.stats().accepted, world.accepted.get());
    }
    assert!(world.script.batches().iter().all(|&size| size <= depth), "batch too large");
    drop(plugs);
    let explicit = world.fuel.get().is_multiple_of(2);
    if explicit {
        engine.shutdown().unwrap();
        assert!(world.check(&engine).is_idle());
        assert!(engine.nop().submit().is_err());
    }
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

#[derive(Clone, Copy, Debug)]
struct Entry {
    access: Access,
    /// Its result was delivered, or its operation was dropped and its buffer was freed.
    done: bool,
    /// It may end with ECANCELED.
    cancelled: bool,
    /// The engine refused it, or it has no buffer and its operation was dropped.
    ignored: bool,
}

struct World {
    engine: Weak<Engine>,
    script: Script,
    file: File,
    image: Image,
    ledger: RefCell<Vec<Entry>>,
    reads_and_writes: RefCell<Vec<(usize, Operation<Buf>)>>,
    others: RefCell<Vec<(usize, Operation<()>)>>,
    /// The requests with a callback or a queue.
    ids: RefCell<Vec<(usize, RequestId)>>,
    bufs_done: CompletionQueue<Buf>,
    others_done: CompletionQueue<()>,
    accepted: Cell<u64>,
    /// The number of errors that the script may still cause.
    failures: Cell<u64>,
    /// The number of requests that callbacks may still make.
    fuel: Cell<u32>,
    /// The number of callbacks that have run.
    reactions: Cell<u64>,
    buffers: Cell<usize>,
    /// The device refuses cancellations.
    refuses: Cell<bool>,
    ended: Cell<bool>,
}

struct Buf {
    id: usize,
    bytes: Vec<u8>,
    world: Rc<World>,
}

// SAFETY: it returns the memory of the `Vec` inside, which no code uses while the engine has the
// value.
unsafe impl IoBuf for Buf {
    fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    fn len(&self) -> usize {
        self.bytes.len()
    }
}

// SAFETY: it returns the memory of the `Vec` inside, which is valid for writing.
unsafe impl IoBufMut for Buf {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.bytes.as_mut_ptr()
    }
}

/// The buffer of a request, or none.
trait Held: Sized + 'static {
    /// The drop of a buffer whose operation was dropped settles its request.
    const SETTLES: bool;

    fn belongs_to(&self, id: usize) -> bool;
    fn bytes(&self) -> &[u8];
    fn operations(world: &World) -> &RefCell<Vec<(usize, Operation<Self>)>>;
    fn queue(world: &World) -> &CompletionQueue<Self>;
}

impl Held for Buf {
    const SETTLES: bool = true;

    fn belongs_to(&self, id: usize) -> bool {
        self.id == id
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn operations(world: &World) -> &RefCell<Vec<(usize, Operation<Self>)>> {
        &world.reads_and_writes
    }

    fn queue(world: &World) -> &CompletionQueue<Self> {
        &world.bufs_done
    }
}

impl Held for () {
    const SETTLES: bool = false;

    fn belongs_to(&self, _id: usize) -> bool {
        true
    }

    fn bytes(&self) -> &[u8] {
        &[]
    }

    fn operations(world: &World) -> &RefCell<Vec<(usize, Operation<Self>)>> {
        &world.others
    }

    fn queue(world: &World) -> &CompletionQueue<Self> {
        &world.others_done
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let world = &self.world;
        world.buffers.set(world.buffers.get() - 1);
        let entry = world.ledger.borrow()[self.id];
        if !entry.done && !entry.ignored && !std::thread::panicking() {
            // The operation was dropped: the engine frees the buffer after the completion.
            world.settle(self.id, None, &self.bytes);
        }
        self.bytes.fill(FREED); // a device that still writes from this buffer spoils the file
    }
}

impl World {
    fn new(engine: &Rc<Engine>, script: Script) -> Rc<Self> {
        let image = Image::new();
        Rc::new(Self {
            engine: Rc::downgrade(engine),
            script,
            file: engine.attach(image.raw.try_clone().unwrap()).unwrap(),
            image,
            ledger: RefCell::default(),
            reads_and_writes: RefCell::default(),
            others: RefCell::default(),
            ids: RefCell::default(),
            bufs_done: CompletionQueue::new(),
            others_done: CompletionQueue::new(),
            accepted: Cell::new(0),
            failures: Cell::new(0),
            fuel: Cell::new(300),
            reactions: Cell::new(0),
            buffers: Cell::new(0),
            refuses: Cell::new(false),
            ended: Cell::new(false),
        })
    }

    /// Makes one request with any front end.
    fn submit(self: &Rc<Self>, engine: &Engine, [front, what, cell, size]: [u8; 4]) {
        let span = CELL * (1 + usize::from(size % 4));
        let at = usize::from(cell) % 66 * CELL + usize::from(size >> 4);
        let len = if size % 32 == 31 { 0 } else { span - usize::from(what >> 4) };
        let kind = match what % 8 {
            0..=2 => Kind::Read { zero_fill: what & 8 != 0 },
            3..=5 if at + len <= FILE_LEN => Kind::Write,
            6 if at + len <= FILE_LEN && len > 0 => Kind::Punch,
            _ => Kind::Other,
        };
        let mut access = Access { kind, at, len };
        if kind != Kind::Other && !self.image.lock(&access) {
            access.kind = Kind::Other;
        }
        let id = self.ledger.borrow().len();
        let entry = Entry { access, done: false, cancelled: false, ignored: false };
        self.ledger.borrow_mut().push(entry);
        match access.kind {
            Kind::Read { zero_fill } => {
                let request = engine.read(&self.file, self.buf(id, vec![FRESH; len]), at as u64);
                let request = if zero_fill { request.zero_fill() } else { request };
                self.submit_by(request, front, id, size);
            }
            Kind::Write => {
                let bytes = (0..len).map(|i| (i * 13 + id * 31) as u8).collect();
                let request = engine.write(&self.file, self.buf(id, bytes), at as u64);
                self.submit_by(request, front, id, size);
            }
            Kind::Punch => {
                let punch = AllocateMode::PunchHole;
                let request = engine.allocate(&self.file, punch, at as u64, len as u64);
                self.submit_by(request, front % 2, id, size); // not as a future
            }
            Kind::Other if what & 16 == 0 => self.submit_by(engine.nop(), front, id, size),
            Kind::Other => self.submit_by(engine.fdatasync(&self.file), front, id, size),
        }
    }

    fn buf(self: &Rc<Self>, id: usize, bytes: Vec<u8>) -> Buf {
        self.buffers.set(self.buffers.get() + 1);
        Buf { id, bytes, world: Rc::clone(self) }
    }

    fn submit_by<B: Held>(
        self: &Rc<Self>,
        request: Request<'_, B>,
        front: u8,
        id: usize,
        then: u8,
    ) {
        self.accepted.set(self.accepted.get() + 1);
        let refused = match front % 5 {
            0 => {
                let world = Rc::clone(self);
                let done = move |result, buf: B| {
                    world.settle(id, Some(&result), buf.bytes());
                    world.react(then);
                };
                self.keep_id(id, request.callback(done)).err()
            }
            1 => self.keep_id(id, request.enqueue(B::queue(self), id as u64)).err(),
            _ => match request.submit() {
                Ok(operation) => {
                    B::operations(self).borrow_mut().push((id, operation));
                    None
                }
                Err(refused) => Some(refused),
            },
        };
        if let Some(refused) = refused {
            self.refused(id);
            assert!(refused.into_request().into_buf().belongs_to(id));
        }
    }

    fn keep_id<E>(&self, entry: usize, accepted: Result<RequestId, E>) -> Result<(), E> {
        accepted.map(|id| self.ids.borrow_mut().push((entry, id)))
    }

    fn refused(&self, id: usize) {
        self.accepted.set(self.accepted.get() - 1);
        let entry = &mut self.ledger.borrow_mut()[id];
        assert!(!entry.done, "refused and delivered");
        entry.ignored = true;
        self.image.unlock(&entry.access);
    }

    /// The actions of a callback after it has checked its result.
    fn react(self: &Rc<Self>, how: u8) {
        assert!(!self.ended.get(), "a callback after the end");
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
                let reactions = self.reactions.get();
                engine.turn(); // it may fill queues
                assert_eq!(reactions, self.reactions.get(), "callbacks nest though none waited");
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
            _ => {}
        }
    }

    /// Drops, polls or waits for an operation.
    fn use_operation(self: &Rc<Self>, which: u8, how: u8) {
        let count = self.reads_and_writes.borrow().len() + self.others.borrow().len();
        let Some(nth) = usize::from(which).checked_rem(count) else { return };
        let bufs = self.reads_and_writes.borrow().len();
        match nth.checked_sub(bufs) {
            None => self.use_nth::<Buf>(nth, how),
            Some(nth) => self.use_nth::<()>(nth, how),
        }
    }

    fn use_nth<B: Held>(self: &Rc<Self>, nth: usize, how: u8) {
        // Not on the list during the wait, which runs callbacks that use the list.
        let (id, mut operation) = B::operations(self).borrow_mut().swap_remove(nth);
        match how % 4 {
            0 => {
                self.ledger.borrow_mut()[id].ignored |= !B::SETTLES;
                drop(operation);
            }
            3 if how & 0x18 == 0 => {
                self.ledger.borrow_mut()[id].cancelled = true;
                operation.cancel();
                B::operations(self).borrow_mut().push((id, operation));
            }
            1 => {
                let (result, buf) = operation.wait();
                self.settle(id, Some(&result), buf.bytes());
            }
            _ => match poll(&mut operation, how) {
                Poll::Ready((result, buf)) => self.settle(id, Some(&result), buf.bytes()),
                Poll::Pending => B::operations(self).borrow_mut().push((id, operation)),
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

    fn script_submission(&self, how: u8, size: u8) {
        let count = usize::from(size % 8);
        self.script.on_submit(match how % 4 {
            0 => SubmitStep::Accept(count),
            1 => SubmitStep::Again,
            2 => {
                self.failures.set(self.failures.get() + 1);
                SubmitStep::Refuse(count, libc::EIO)
            }
            _ => SubmitStep::Inline,
        });
    }

    fn script_transfer(&self, how: u8, size: u8) {
        self.script.on_transfer(match how % 8 {
            0 | 1 => Transfer::Full,
            2..=4 => Transfer::Short(usize::from(size % 48)),
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
        self.empty::<()>();
    }

    fn empty<B: Held>(&self) {
        while let Some(done) = B::queue(self).pop() {
            let id = done.token as usize;
            assert!(done.buf.belongs_to(id));
            self.settle(id, Some(&done.result), done.buf.bytes());
        }
    }

    fn collect<B: Held>(&self) {
        for (id, operation) in B::operations(self).take() {
            assert!(operation.is_done(), "lost: {:?}", self.ledger.borrow()[id]);
            let (result, buf) = operation.wait();
            self.settle(id, Some(&result), buf.bytes());
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
            let retried = matches!(error.errno(), libc::EAGAIN | libc::EINTR);
            let cancelled = error.errno() == libc::ECANCELED && entry.cancelled;
            let failed = error.errno() == libc::EIO;
            assert!(retried || cancelled || failed, "{error}");
            if failed {
                let left = self.failures.get().checked_sub(1);
                self.failures.set(left.expect("more errors than the script caused"));
            }
            self.image.check_count(&entry.access, error.transferred(), bytes);
        }
        let moved = result.and_then(|result| result.as_ref().ok()).copied();
        self.image.complete(&entry.access, moved, bytes);
    }

    /// Checks that the numbers of the engine, the device and the model agree.
    fn check(&self, engine: &Engine) -> Turn {
        let turn = engine.validate();
        let device = self.script.in_flight() + self.script.visible();
        assert_eq!(turn.in_flight, device, "engine and device disagree on what is in flight");
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
        assert_eq!(self.script.in_flight() + self.script.visible(), 0);
        self.collect::<Buf>();
        self.collect::<()>();
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
    let counting = Waker::from(std::sync::Arc::new(Idle));
    let waker = if how & 4 == 0 { Waker::noop() } else { &counting };
    Pin::new(operation).poll(&mut Context::from_waker(waker))
}

struct Idle;

impl std::task::Wake for Idle {
    fn wake(self: std::sync::Arc<Self>) {}
}
