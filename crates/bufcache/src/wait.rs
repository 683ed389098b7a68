//! Waits that either block the calling thread or suspend a task.
//!
//! The write-back, the sync and the discard of a device are `async` functions, which serve both.
//!
//! ```text
//!  flush        ──► block_on: polled by the caller, which sleeps in between
//!  flush_async  ──► Running: polled by the caller, then by each thread that ends what it waits for
//! ```
//!
//! # Invariants
//!
//! 1. A thread that sleeps in [`block_on`] polls again after each wake-up that came since its last
//!    poll began.
//! 2. A [`Running`] future is polled by one thread at a time, and once more after a wake-up that
//!    came during a poll.
//! 3. A running future goes on without the task that began it. It is dropped only when it is ready.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;
use std::{mem, ptr, thread};

use offlock_sync::panics::drop_payload;
use offlock_sync::{Futex, Mutex, WaitSet, check, const_thread_local, step};

const_thread_local! {
    /// The data of the waker with which [`block_on`] polls on this thread. Null outside of a poll.
    static BLOCKED: Cell<*const ()> = Cell::new(ptr::null());
    /// When that [`block_on`] polls again at the latest.
    static POLL_AT: Cell<Option<Instant>> = Cell::new(None);
    /// Set while this thread polls a [`Running`] future.
    static RUNS: Cell<bool> = Cell::new(false);
}

/// Runs a future on the calling thread, which sleeps while the future waits.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let (mut future, poll_at) = (pin!(future), Cell::new(None));
    let poll = |context: &mut Context<'_>| {
        let blocked = BLOCKED.with(|blocked| blocked.replace(context.waker().data()));
        let outer = POLL_AT.with(Cell::take);
        let _outer = Outer { blocked, poll_at: outer, inner: &poll_at };
        future.as_mut().poll(context)
    };
    let sleep = |woken: &Futex, seen| {
        woken.wait_until(seen, poll_at.take());
        true
    };
    offlock_sync::block_on(poll, sleep).expect("it sleeps until the future is ready")
}

/// The values of the `block_on` around this one. The drop restores them, also if the future panics.
struct Outer<'b> {
    blocked: *const (),
    poll_at: Option<Instant>,
    inner: &'b Cell<Option<Instant>>,
}

impl Drop for Outer<'_> {
    fn drop(&mut self) {
        BLOCKED.with(|blocked| blocked.set(self.blocked));
        self.inner.set(POLL_AT.with(|poll_at| poll_at.replace(self.poll_at)));
    }
}

/// If [`block_on`] of the calling thread polls the future, lets it poll again at that time at the
/// latest. Returns whether it does.
pub(crate) fn poll_again_at(at: Instant, context: &Context<'_>) -> bool {
    let is_blocking = is_blocked_by(context);
    if is_blocking {
        POLL_AT.with(|poll_at| poll_at.set(Some(at)));
    }
    is_blocking
}

fn is_blocked_by(context: &Context<'_>) -> bool {
    let blocked = BLOCKED.with(Cell::get);
    !blocked.is_null() && blocked == context.waker().data()
}

/// Returns whether [`block_on`] of the calling thread polls the future. Then the future may block the
/// thread, and guards of the thread are guards of its caller. False in a [`Running`] future, also if
/// the thread polls that inside a `block_on`.
pub(crate) async fn is_blocking() -> bool {
    poll_fn(|context| Poll::Ready(is_blocked_by(context))).await
}

/// Returns whether this thread polls a [`Running`] future. Such a thread may be the only one that
/// ends operations of a device, so it must not wait for one.
pub(crate) fn runs_operation() -> bool {
    RUNS.with(Cell::get)
}

/// The most wake-ups inside each other on one stack. One more runs on a new thread.
const MOST_NESTED: u32 = if cfg!(offlock_model) { u32::MAX } else { 64 };

thread_local! {
    static NESTED: Cell<u32> = const { Cell::new(0) };
}

/// Wakes a task or thread. The caller holds no lock, because a waker is foreign code; it may panic.
pub(crate) fn wake(waker: Waker) {
    // A waker may poll its task on this thread, and the poll may wake the next task in line.
    let nested = NESTED.get();
    let _ = contain(|| {
        if nested >= MOST_NESTED {
            let other = waker.clone();
            if thread::Builder::new().spawn(move || wake(other)).is_ok() {
                return;
            }
        }
        NESTED.set(nested + 1);
        waker.wake();
    });
    NESTED.set(nested);
}

/// Wakes the threads and tasks of these wakers. The caller holds no lock.
pub(crate) fn wake_all(wakers: impl IntoIterator<Item = Waker>) {
    wakers.into_iter().for_each(wake);
}

type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An operation that goes on without the task that began it.
struct Running(Mutex<State>);

struct State {
    /// `None` while a thread polls it, and once it has ended.
    future: Option<Boxed>,
    /// Set if a wake-up has come since the last poll began.
    woken: bool,
}

impl Wake for Running {
    fn wake(self: Arc<Self>) {
        let mut state = self.0.lock();
        state.woken = true;
        let Some(mut future) = state.future.take() else { return };
        let waker = Waker::from(Arc::clone(&self));
        let mut context = Context::from_waker(&waker);
        loop {
            state.woken = false;
            drop(state);
            let outer = RUNS.with(|runs| runs.replace(true));
            let polled = future.as_mut().poll(&mut context);
            RUNS.with(|runs| runs.set(outer));
            if polled.is_ready() {
                return;
            }
            state = self.0.lock();
            if check!("running: it was not woken meanwhile", !state.woken) {
                state.future = Some(future);
                return;
            }
        }
    }
}

/// Begins an operation on the calling thread, and waits for its end. If the returned future is
/// dropped after its first poll, the operation goes on.
///
/// # Panics
///
/// Panics if the operation panics.
pub(crate) fn run<F>(future: F) -> impl Future<Output = F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    // Here, so that the future of the caller has no room for it.
    let mut future = Some(Box::pin(future));
    async move {
        let reply = Reply::new();
        let end = Arc::clone(&reply);
        // A future that has panicked is neither polled nor dropped, because the device may still use
        // memory that the future owns.
        let poll = move |context: &mut Context<'_>| {
            let polled = contain(|| future.as_mut().map(|future| future.as_mut().poll(context)));
            match polled {
                Ok(polled) => polled.unwrap_or(Poll::Pending).map(Ok),
                Err(panicked) => {
                    mem::forget(future.take());
                    Poll::Ready(Err(panicked))
                }
            }
        };
        let future: Boxed = Box::pin(async move { end.end(poll_fn(poll).await) });
        Arc::new(Running(Mutex::new(State { future: Some(future), woken: false }))).wake();
        match reply.wait().await {
            Ok(result) => result,
            Err(Panicked) => panic!("an operation of the cache has panicked"),
        }
    }
}

/// The result of a call or an operation, for the task that waits for it.
pub(crate) struct Reply<T> {
    result: Mutex<Option<Result<T, Panicked>>>,
    waiters: WaitSet,
}

impl<T> Reply<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { result: Mutex::new(None), waiters: WaitSet::new() })
    }

    pub(crate) fn end(&self, result: Result<T, Panicked>) {
        *self.result.lock() = Some(result);
        step!("call: wake the task", wake_all(self.waiters.take(None)));
    }

    /// Waits for the result. If the future is dropped, its waker is dropped with it.
    pub(crate) async fn wait(&self) -> Result<T, Panicked> {
        let mut waiter = pin!(self.waiters.waiter());
        poll_fn(|context| waiter.as_mut().poll(context, || self.result.lock().take())).await
    }
}

// Calls of foreign code (devices, verifiers, callbacks, wakers, and what these drop) that may
// panic.

/// A contained call has panicked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panicked;

/// Calls `f` and keeps a panic from unwinding into the caller.
///
/// The payload's drop is foreign code too: a panic of it is caught as well, and its payload leaks.
pub(crate) fn contain<R>(f: impl FnOnce() -> R) -> Result<R, Panicked> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        drop_payload(payload);
        Panicked
    })
}

/// Calls `job` on a thread of the cache, and drops a panic of it, which must not end the thread.
///
/// `job` is code of the cache that may drop a device or its last handle. A model does not catch the
/// panic, because the checker reports an error by a panic.
pub(crate) fn contain_job(job: impl FnOnce()) {
    if cfg!(offlock_model) {
        job();
    } else {
        let _ = contain(job);
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_future_knows_whether_its_thread_blocks_for_it() {
        let nested = || block_on(is_blocking());
        let all = block_on(async {
            let task = run(async { (is_blocking().await, block_on(is_blocking())) }).await;
            (is_blocking().await, task, nested(), is_blocking().await)
        });
        assert_eq!(all, (true, (false, true), true, true));
        let mut task = pin!(is_blocking());
        let told = task.as_mut().poll(&mut Context::from_waker(Waker::noop())); // whose data is null
        assert_eq!(told, Poll::Ready(false));
    }

    #[test]
    fn a_panic_removes_the_mark() {
        contain(|| block_on(async { panic!("on purpose") })).unwrap_err();
        assert!(BLOCKED.with(|blocked| blocked.get().is_null()));
    }

    #[test]
    fn a_thread_that_exits_blocks_for_its_future() {
        struct Exits(mpsc::Sender<(bool, bool)>);
        impl Drop for Exits {
            fn drop(&mut self) {
                let both = async { (is_blocking().await, run(is_blocking()).await) };
                self.0.send(block_on(both)).unwrap();
            }
        }
        thread_local! {
            static BEFORE: Cell<Option<Exits>> = const { Cell::new(None) };
            static AFTER: Cell<Option<Exits>> = const { Cell::new(None) };
        }
        let (sender, told) = mpsc::channel();
        let exits = thread::spawn(move || {
            BEFORE.set(Some(Exits(sender.clone())));
            assert!(block_on(is_blocking()));
            AFTER.set(Some(Exits(sender)));
        });
        exits.join().unwrap();
        assert_eq!(told.iter().collect::<Vec<_>>(), [(true, false); 2]);
    }
}
