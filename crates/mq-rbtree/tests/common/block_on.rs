//! A thread that runs one future, and sleeps meanwhile.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A waker that ends the calling thread's next `park`.
pub(crate) fn unparker() -> Waker {
    Waker::from(Arc::new(Unpark(thread::current())))
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let waker = unparker();
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
