//! A thread as the executor of what it waits for: it polls, and sleeps until its waker is called.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use crate::Futex;

/// The waker of a thread. A waking thread has a reference of its own, because the sleeping thread may exit
/// as soon as its poll is ready.
struct ThreadWaker {
    /// Counts the wake-ups.
    woken: Futex,
}

crate::thread_local! {
    /// The waker of this thread, in both forms.
    static CURRENT: (Arc<ThreadWaker>, Waker) = ThreadWaker::new();
}

impl ThreadWaker {
    fn new() -> (Arc<Self>, Waker) {
        let new = Arc::new(Self { woken: Futex::new() });
        (Arc::clone(&new), Waker::from(new))
    }
}

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.woken.advance();
        self.woken.wake_one();
    }
}

/// Polls on the calling thread until `poll` is ready. Returns `None` if `sleep` returns false.
///
/// Between two polls it calls `sleep` with the futex that the waker advances, and with the count of that
/// futex before the poll, so that a wake-up since then ends the sleep. Inside `poll`, another `block_on` may
/// use the same futex: that ends the outer sleep early, and loses no wake-up.
///
/// Allocates once for each thread, and during the exit of the thread each time.
pub fn block_on<R>(
    mut poll: impl FnMut(&mut Context<'_>) -> Poll<R>,
    mut sleep: impl FnMut(&Futex, u32) -> bool,
) -> Option<R> {
    let mut run = |thread: &ThreadWaker, waker: &Waker| {
        let mut context = Context::from_waker(waker);
        loop {
            let seen = thread.woken.load();
            if let Poll::Ready(value) = poll(&mut context) {
                return Some(value);
            }
            if !sleep(&thread.woken, seen) {
                return None;
            }
        }
    };
    CURRENT.try_with(|(thread, waker)| run(thread, waker)).unwrap_or_else(|_| {
        // During thread exit the thread-local variable may be gone already.
        let (thread, waker) = ThreadWaker::new();
        run(&thread, &waker)
    })
}
