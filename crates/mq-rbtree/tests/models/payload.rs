//! What the models send: a message whose way through the queue the checker sees, and which somebody
//! must get in the end; and those who wait for it.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc as Plain;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use mq_rbtree::{Bitmap, Builder, Levels, Queue, ReceiveError, SendError, SendRefused, Wait};
use percpu::sync::native::atomic::{AtomicUsize, Ordering};
use percpu::sync::quarantine::{Watched, free};
use percpu::sync::{Arc, Futex, model, thread};

// A model's threads all run on one thread of the system: this is one count per run, and no part of
// what is checked.
std::thread_local! {
    static MADE: Cell<usize> = const { Cell::new(0) };
    static SEEN: Cell<usize> = const { Cell::new(0) };
    static DROPPED: Cell<usize> = const { Cell::new(0) };
}

fn count(what: &'static std::thread::LocalKey<Cell<usize>>) {
    what.set(what.get() + 1);
}

/// A message. A read that is not ordered behind its sender's writes fails the model, and so does a
/// second owner.
pub(super) struct Payload(*mut Watched<u64>);

// SAFETY: it has one owner, who alone reads and frees it: that is what the models check.
unsafe impl Send for Payload {}

impl Payload {
    pub(super) fn new(id: u64) -> Self {
        count(&MADE);
        Self(Box::into_raw(Box::new(Watched::new(id))))
    }

    pub(super) fn id(&self) -> u64 {
        // SAFETY: alive, or in quarantine until the run is over, where the canary is dead.
        **unsafe { &*self.0 }
    }

    /// Somebody got it: received, or given back.
    pub(super) fn seen(self) -> u64 {
        count(&SEEN);
        self.id()
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        count(&DROPPED);
        // SAFETY: ours from `into_raw`; a second drop finds the canary dead.
        free(unsafe { Box::from_raw(self.0) });
    }
}

/// How many messages were made that nobody got: to be asked for when nobody has one any more.
pub(super) fn unseen() -> usize {
    MADE.get() - SEEN.get()
}

/// Runs a model, at the end of which all messages are dropped, and all but `may_go_unseen` were seen.
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

/// Runs a model, at the end of which somebody saw each message.
pub(super) fn run(f: impl Fn() + Send + Sync + 'static) {
    run_with_unseen(0, f);
}

pub(super) type Shared<L> = Arc<Queue<Payload, L>>;

/// The levels that models are about.
pub(super) trait TestLevels: Levels<Priority = u32, Hint: Send + Sync> + 'static {}
impl<L: Levels<Priority = u32> + 'static> TestLevels for L {}

/// A queue of so many messages, with some in it: 0, 1 and so on, with priority 0.
pub(super) fn with<L: TestLevels>(max: usize, len: u64) -> Shared<L> {
    let queue = Builder::new(max).build().unwrap();
    (0..len).for_each(|id| queue.try_send(Payload::new(id), 0).unwrap());
    Arc::new(queue)
}

/// A queue of so many bytes; a message has as many as its number says.
pub(super) fn measured(bytes: u64) -> Shared<Bitmap> {
    let builder = Queue::builder(8).measure(|message: &Payload| message.id() as usize);
    Arc::new(builder.max_bytes(bytes).build().unwrap())
}

/// A wait that may reach its deadline at any moment.
pub(super) fn soon() -> Wait {
    Wait::at_most(Duration::from_secs(3600))
}

/// Looks at a queue that others use: nobody waits for what is there. No task has a permit.
pub(super) fn check_waiters<L: TestLevels>(queue: &Queue<Payload, L>) {
    queue.validate();
    let stats = queue.stats();
    let (to_send, to_receive) = stats.waiting;
    assert!(to_send == 0 || to_receive == 0, "both wait");
    assert!(to_send == 0 || stats.depth == queue.max_messages(), "a wait to send beside room");
    assert!(to_receive == 0 || stats.depth == 0, "a wait to receive beside a message");
}

/// When nobody is at it: receives what is left, and says how many that were.
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

/// Takes a while, so that others come in between as often as not; loom needs no help.
pub(super) fn yield_often() {
    if cfg!(offlock_shuttle) {
        (0..50).for_each(|_| thread::yield_now());
    }
}

/// One if a message was sent; it is given back for this reason if not.
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

/// One if a message was received; none was for this reason if not.
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

/// Counts how often it is woken.
pub(super) struct WakeCounter(Plain<Wakes>);

struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Plain<Self>) {
        // Ordering: Relaxed; counted at the end, behind the joins.
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl WakeCounter {
    pub(super) fn new() -> Self {
        Self(Plain::new(Wakes(AtomicUsize::new(0))))
    }

    pub(super) fn waker(&self) -> Waker {
        Plain::clone(&self.0).into()
    }

    pub(super) fn wakes(&self) -> usize {
        // Ordering: Relaxed; as above.
        self.0.0.load(Ordering::Relaxed)
    }

    /// Polls a future that rings this counter.
    pub(super) fn poll<F: Future>(&self, future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(&self.waker()))
    }
}

/// Wakes a thread that polls.
struct Unpark(Futex);

impl Wake for Unpark {
    fn wake(self: Plain<Self>) {
        self.0.advance();
        self.0.wake_one();
    }
}

/// Polls a future until it is ready, and only when it was woken: a lost wake-up is a deadlock.
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
