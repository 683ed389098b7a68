//! The messages of the models, and helpers. The checker observes each message on its way, and each
//! message must be received or returned in the end.

use std::cell::Cell;
use std::env;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc as Plain;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use mq_rbtree::{Bitmap, Builder, Levels, Queue, ReceiveError, SendError, SendRefused};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::{Arc, Futex, model, thread, with_preemptions};
use testkit::WakeCount;

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
pub(super) fn spawn<L: TestLevels, R: Send + 'static>(
    queue: &Shared<L>,
    f: impl FnOnce(&Shared<L>) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let queue = Arc::clone(queue);
    thread::spawn(move || f(&queue))
}

/// Receives in another thread, by itself or by a task, until the queue has ended. Returns 1 for a message.
pub(super) fn receive(queue: &Shared<Bitmap>, by_task: bool) -> thread::JoinHandle<u64> {
    spawn(queue, move |queue| {
        let got = if by_task { block_on(queue.receive_async()) } else { queue.receive() };
        received(got, ReceiveError::Closed)
    })
}

/// Sends a message in another thread, by itself or by a task, unless the queue is closed. Returns 1 if it was
/// sent.
pub(super) fn send(queue: &Shared<Bitmap>, id: u64, by_task: bool) -> thread::JoinHandle<u64> {
    let message = Payload::new(id);
    spawn(queue, move |queue| {
        let result =
            if by_task { block_on(queue.send_async(message, 0)) } else { queue.send(message, 0) };
        sent(result, SendRefused::Closed)
    })
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

/// A waker that counts its wake-ups.
pub(super) struct WakeCounter(Plain<WakeCount>);

impl WakeCounter {
    pub(super) fn new() -> Self {
        Self(WakeCount::new())
    }

    pub(super) fn waker(&self) -> Waker {
        self.0.waker()
    }

    pub(super) fn wakes(&self) -> usize {
        self.0.count()
    }

    /// Polls a future with this waker.
    pub(super) fn poll<F: Future>(&self, future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(&self.waker()))
    }
}

/// A waker that wakes a polling thread.
struct Unpark(Futex);

impl Wake for Unpark {
    fn wake(self: Plain<Self>) {
        self.0.advance();
        self.0.wake_one();
    }
}

/// Polls a future until it is ready, and only after wake-ups: a lost wake-up is a deadlock.
pub(super) fn block_on<F: Future>(future: F) -> F::Output {
    let woken = Plain::new(Unpark(Futex::new()));
    let waker = Waker::from(Plain::clone(&woken));
    let mut future = pin!(future);
    loop {
        let seen = woken.0.load();
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        woken.0.wait(seen);
    }
}
