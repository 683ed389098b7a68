//! An executor for one future on the calling thread, and a waker that counts its calls.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use crate::wait::PATIENCE;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Returns a waker that ends the calling thread's next `park`.
pub fn unparker() -> Waker {
    Waker::from(Arc::new(Unpark(thread::current())))
}

/// Polls `future` to completion. The thread sleeps between polls.
///
/// # Panics
///
/// Panics if the future is still pending after a minute: a wake-up was lost.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let waker = unparker();
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let start = Instant::now();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        assert!(start.elapsed() < PATIENCE, "a wake-up is lost");
        thread::park_timeout(PATIENCE);
    }
}

/// The number of times that its wakers were called.
#[derive(Debug, Default)]
pub struct WakeCount(AtomicUsize);

impl WakeCount {
    /// Begins at zero.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns a waker that adds one.
    pub fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }

    /// Returns how often a waker was called.
    pub fn count(&self) -> usize {
        // Ordering: SeqCst, like the add in `wake`: the tests that compare it with other flags
        // need a single order.
        self.0.load(SeqCst)
    }
}

impl Wake for WakeCount {
    fn wake(self: Arc<Self>) {
        // Ordering: SeqCst, with the load in `count`.
        self.0.fetch_add(1, SeqCst);
    }
}

/// A future with the waker of its polls.
#[derive(Debug)]
pub struct TestTask<F> {
    /// Counts the wake-ups; a poll uses the one that is here.
    pub woken: Arc<WakeCount>,
    future: Pin<Box<F>>,
}

impl<F: Future> TestTask<F> {
    /// A task that has not begun.
    pub fn new(future: F) -> Self {
        Self { woken: WakeCount::new(), future: Box::pin(future) }
    }

    /// Polls a future that waits.
    ///
    /// # Panics
    ///
    /// Panics if it does not wait.
    #[track_caller]
    pub fn waiting(future: F) -> Self {
        let mut task = Self::new(future);
        assert!(task.poll().is_pending());
        task
    }

    /// Polls once.
    pub fn poll(&mut self) -> Poll<F::Output> {
        self.future.as_mut().poll(&mut Context::from_waker(&self.woken.waker()))
    }

    /// Returns how often the task was woken.
    pub fn wakes(&self) -> usize {
        self.woken.count()
    }
}
