//! The messages of the models, and helpers. The checker observes each message on its way, and each
//! message must be received or returned in the end.

use std::cell::Cell;
use std::env;
use std::future::Future;
use std::pin::pin;
use std::time::{Duration, Instant};

use mq_rbtree::{Bitmap, Builder, Levels, Queue, ReceiveError, SendError, SendRefused};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::{Arc, Futex, model, thread, with_preemptions};

// All threads of a model run on one system thread, so each counter counts one run. The counters are
// not part of the checked memory.
std::thread_local! {
    static MADE: Cell<usize> = const { Cell::new(0) };
    static SEEN: Cell<usize> = const { Cell::new(0) };
    static DROPPED: Cell<usize> = const { Cell::new(0) };
}

fn count(what: &'static std::thread::LocalKey<Cell<usize>>) {
    what.set(what.get() + 1);
}

/// A message. The model fails if a read is not ordered after its sender's writes, or if the message
/// has two owners.
pub(super) struct Payload(*mut Watched<u64>);

// SAFETY: a message has one owner, which alone reads and frees it. The models check that.
unsafe impl Send for Payload {}

impl Payload {
    pub(super) fn new(id: u64) -> Self {
        count(&MADE);
        Self(Box::into_raw(Box::new(Watched::new(id))))
    }

    pub(super) fn id(&self) -> u64 {
        // SAFETY: the memory is alive, or in quarantine until the run is over, and its canary is
        // dead then.
        **unsafe { &*self.0 }
    }

    /// Counts the message as received or returned, and returns its number.
    pub(super) fn seen(self) -> u64 {
        count(&SEEN);
        self.id()
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        count(&DROPPED);
        // SAFETY: the pointer comes from `into_raw`. A second drop would find the canary dead.
        free(unsafe { Box::from_raw(self.0) });
    }
}

/// Returns how many messages were made and neither received nor returned. No thread has one when
/// this is called.
pub(super) fn unseen() -> usize {
    MADE.get() - SEEN.get()
}

/// Runs a model. At its end all messages must be dropped, and all but `may_go_unseen` must have
/// been received or returned.
pub(super) fn run_with_unseen(may_go_unseen: usize, f: impl Fn() + Send + Sync + 'static) {
    model(move || {
        for count in [&MADE, &SEEN, &DROPPED] {
            count.set(0);
        }
        f();
        assert_eq!(DROPPED.get(), MADE.get(), "messages dropped, of those made");
        assert!(unseen() <= may_go_unseen, "{} messages are lost", unseen());
    });
}

/// Runs a model. At its end each message must have been received or returned.
pub(super) fn run(f: impl Fn() + Send + Sync + 'static) {
    run_with_unseen(0, f);
}

/// Runs a model with at least three preemptions, for models that take less than a second with them.
///
/// Not with a planted bug: two show it, and a run that a bug makes longer is not worth the time.
pub(super) fn thoroughly(f: impl Fn() + Send + Sync + 'static) {
    let least = if env::var_os("OFFLOCK_MUTANT").is_some() { 0 } else { 3 };
    with_preemptions(least, || run(f));
}

pub(super) type Shared<L> = Arc<Queue<Payload, L>>;

/// The levels used in the models.
pub(super) trait TestLevels: Levels<Priority = u32, Hint: Send + Sync> + 'static {}
impl<L: Levels<Priority = u32> + 'static> TestLevels for L {}

/// Creates a queue of `max` messages that has `len` already: 0, 1 and so on, with priority 0.
pub(super) fn with<L: TestLevels>(max: usize, len: u64) -> Shared<L> {
    let queue = Builder::new(max).build().unwrap();
    (0..len).for_each(|id| queue.try_send(Payload::new(id), 0).unwrap());
    Arc::new(queue)
}

/// Runs `f` in another thread.
pub(super) fn spawn<Q: Send + Sync + 'static, R: Send + 'static>(
    shared: &Arc<Q>,
    f: impl FnOnce(&Arc<Q>) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}

/// An operation that waits.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    Send(u64),
    Receive,
    ReceiveGuard,
}

/// The kind of a waiter.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum By {
    Thread,
    Task,
    /// A thread whose deadline may be over at any moment.
    Deadline,
}

use By::{Deadline, Task, Thread};
use Operation::{Receive, ReceiveGuard, Send as SendOne};

impl Operation {
    /// Performs the operation as a task. Returns 1 if it sent or received a message, and 0 if the queue is closed.
    pub(super) async fn perform(self, queue: &Queue<Payload>) -> u64 {
        let none = ReceiveError::Closed;
        match self {
            SendOne(id) => sent(queue.send_async(Payload::new(id), 0).await, SendRefused::Closed),
            Receive => received(queue.receive_async().await, none),
            ReceiveGuard => received(queue.receive_guard_async().await.map(|g| g.accept()), none),
        }
    }

    /// Performs the operation in another thread. Returns 1 if it sent or received a message, and 0 if the queue is
    /// closed, or after the deadline.
    pub(super) fn spawn(self, queue: &Shared<Bitmap>, by: By) -> thread::JoinHandle<u64> {
        let (full, none) = match by {
            Deadline => (SendRefused::Timeout, ReceiveError::Timeout),
            Thread | Task => (SendRefused::Closed, ReceiveError::Closed),
        };
        spawn(queue, move |queue| match (self, by) {
            (_, Task) => block_on(self.perform(queue)),
            (SendOne(id), Thread) => sent(queue.send(Payload::new(id), 0), full),
            (SendOne(id), Deadline) => sent(queue.send_deadline(Payload::new(id), 0, soon()), full),
            (Receive, Thread) => received(queue.receive(), none),
            (Receive, Deadline) => received(queue.receive_deadline(soon()), none),
            (ReceiveGuard, Thread) => received(queue.receive_guard().map(|g| g.accept()), none),
            (ReceiveGuard, Deadline) => {
                received(queue.receive_guard_deadline(soon()).map(|g| g.accept()), none)
            }
        })
    }

    /// Ends a wait: receives a message, or sends one.
    pub(super) fn serve(self, queue: &Queue<Payload>) {
        match self {
            SendOne(id) => assert!(queue.receive().unwrap().0.seen() < id, "the older one"),
            Receive | ReceiveGuard => queue.send(Payload::new(9), 0).unwrap(),
        }
    }

    /// Performs the operation in another thread, on a queue that is full or empty, and ends its wait. The operation
    /// succeeds, or times out and changes nothing.
    pub(super) fn wait_and_end(self, queue: &Shared<Bitmap>, by: By) {
        let waits = self.spawn(queue, by);
        self.serve(queue);
        let done = waits.join().unwrap();
        assert!(done == 1 || by == Deadline);
        let left = if matches!(self, SendOne(_)) { done } else { 1 - done };
        assert_eq!((queue.stats().timeouts, finish(queue)), (1 - done, left));
    }
}

/// Returns a deadline that may be over at any moment.
pub(super) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Receives the remaining messages when no other thread uses the queue, and returns their number.
pub(super) fn finish<L: TestLevels>(queue: &Queue<Payload, L>) -> u64 {
    queue.validate();
    let mut left = 0;
    while let Ok((message, _)) = queue.try_receive() {
        message.seen();
        left += 1;
    }
    queue.validate();
    let stats = queue.stats();
    assert_eq!((stats.depth, stats.waiting), (0, (0, 0)));
    assert_eq!(stats.sent, stats.received);
    assert!(stats.peak <= queue.max_messages());
    left
}

/// Yields, so that other threads often run in between; loom needs no help.
pub(super) fn yield_often() {
    if cfg!(offlock_shuttle) {
        (0..50).for_each(|_| thread::yield_now());
    }
}

/// Returns 1 if a message was sent. Otherwise it must have been returned for this reason.
pub(super) fn sent(result: Result<(), SendError<Payload>>, or: SendRefused) -> u64 {
    match result {
        Ok(()) => 1,
        Err(error) => {
            assert_eq!(error.reason, or);
            error.value.seen();
            0
        }
    }
}

/// Returns 1 if a message was received. Otherwise the error must be this one.
pub(super) fn received(result: Result<(Payload, u32), ReceiveError>, or: ReceiveError) -> u64 {
    match result {
        Ok((message, _)) => {
            message.seen();
            1
        }
        Err(error) => {
            assert_eq!(error, or);
            0
        }
    }
}

/// Polls a future until it is ready, and only after wake-ups: a lost wake-up is a deadlock.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let sleep = |woken: &Futex, seen| {
        woken.wait(seen);
        true
    };
    let output = offlock_sync::block_on(|context| future.as_mut().poll(context), sleep);
    output.expect("it sleeps until there is one")
}
