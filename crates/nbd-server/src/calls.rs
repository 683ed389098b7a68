//! The blocking calls of one image, made in turn by one thread of the cache: TRIMs, ZEROES, and
//! WRITEs past the cache that must wait for a block.
//!
//! ```text
//!  WRITE, TRIM ─► queue ─► a thread runs the queue? ─yes─► it makes this call too
//!                              └─no─► a thread begins to
//! ```
//!
//! A file system locks a file while it punches a hole, so several threads would wait for each
//! other, and READs for them. With one thread the 99th percentile of a READ beside TRIMs is 0.1 ms
//! instead of 3.9 ms (`cargo bench --bench nbd -- --only W8`). Requests that arrive together wake
//! the thread once.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use offlock_sync::Mutex;

use crate::blocks::Image;

/// How long the thread makes calls before it yields the CPU. A guess: a few context switches cost
/// less.
const TURN: Duration = Duration::from_micros(50);

type Call = Box<dyn FnOnce() + Send>;

/// The calls of one image.
#[derive(Default)]
pub(crate) struct Calls(Mutex<State>);

#[derive(Default)]
struct State {
    /// A thread runs the queue, and will make each call that is added.
    runs: bool,
    queue: VecDeque<Call>,
}

/// The result of a call, for which a task waits.
struct Reply<T>(Mutex<(Option<thread::Result<T>>, Option<Waker>)>);

impl Image {
    /// Runs a blocking call on a thread of the cache, in turn with the image's other calls.
    pub(crate) async fn call<T: Send + 'static>(
        self: &Arc<Self>,
        call: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> T {
        let image = Arc::clone(self);
        let begin = || {
            let image = Arc::clone(self);
            // The first poll starts the call, which continues without this future.
            let run = pin!(self.device.call_async(move |_| image.calls.run()));
            let _ = run.poll(&mut Context::from_waker(Waker::noop()));
        };
        self.calls.make(move || call(&image), begin).await
    }
}

impl Calls {
    /// Queues a call and waits for its result. Calls `begin`, which must start a thread that calls
    /// [`run`](Self::run), if none runs. If there is no memory to queue the call, the calling
    /// thread makes it. A call is made even if the future is dropped.
    ///
    /// # Panics
    ///
    /// Panics if the call panics.
    pub(crate) async fn make<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
        begin: impl FnOnce(),
    ) -> T {
        let reply = Arc::new(Reply(Mutex::new((None, None))));
        let end = Arc::clone(&reply);
        let call: Call = Box::new(move || end.end(catch_unwind(AssertUnwindSafe(call))));
        match self.push(call) {
            Ok(true) => begin(),
            Ok(false) => {}
            Err(call) => call(),
        }
        reply.wait().await.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Queues a call. Returns whether no thread runs the queue. Returns the call if there is no
    /// memory.
    fn push(&self, call: Call) -> Result<bool, Call> {
        let mut state = self.0.lock();
        if state.queue.try_reserve(1).is_err() {
            return Err(call);
        }
        state.queue.push_back(call);
        Ok(!std::mem::replace(&mut state.runs, true))
    }

    /// Makes calls until the queue is empty.
    pub(crate) fn run(&self) {
        let mut since = Instant::now();
        loop {
            let mut state = self.0.lock();
            let Some(call) = state.queue.pop_front() else {
                state.runs = false;
                return;
            };
            drop(state);
            // A panic of the call itself is passed to its task. This one came from a waker, or from
            // dropping a result.
            let _ = catch_unwind(AssertUnwindSafe(call));
            if since.elapsed() > TURN {
                thread::yield_now(); // a worker may wait for this CPU
                since = Instant::now();
            }
        }
    }
}

impl<T> Reply<T> {
    fn end(&self, result: thread::Result<T>) {
        let mut state = self.0.lock();
        state.0 = Some(result);
        let waker = state.1.take();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    async fn wait(&self) -> thread::Result<T> {
        poll_fn(|context| {
            let mut state = self.0.lock();
            match state.0.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    state.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn one_thread_makes_the_calls_in_turn_also_those_that_come_meanwhile() {
        let calls = Calls::default();
        let (order, begun) = (Arc::new(Mutex::new(Vec::new())), Cell::new(0));
        let call = |number: u32, panics: bool| {
            let order = Arc::clone(&order);
            let note = move || {
                order.lock().push(number);
                assert!(!panics, "a bug that the test planted");
                number
            };
            calls.make(note, || begun.set(begun.get() + 1))
        };
        let mut context = Context::from_waker(Waker::noop());
        let [mut first, mut second] =
            [(1, false), (2, true)].map(|(n, panics)| Box::pin(call(n, panics)));
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        let _ = pin!(call(3, false)).poll(&mut context); // dropped, but the call is made
        calls.run();
        assert_eq!((begun.get(), &*order.lock()), (1, &vec![1, 2, 3]));
        assert_eq!(first.as_mut().poll(&mut context), Poll::Ready(1));
        let panicked = catch_unwind(AssertUnwindSafe(|| second.as_mut().poll(&mut context)));
        assert!(panicked.is_err(), "the panic of a call is its task's");
        let _ = pin!(call(4, false)).poll(&mut context);
        assert_eq!(begun.get(), 2, "none runs any more");
    }
}
