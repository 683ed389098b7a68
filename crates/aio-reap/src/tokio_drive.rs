//! The driver of an engine on a tokio runtime: [`round`] after each edge of the engine's descriptor.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::yield_now;

use crate::core::Core;
use crate::drive::round;
use crate::engine::Engine;
use crate::engine::Plug;
use crate::sys;

impl Engine {
    /// Turns the engine whenever needed, on the tokio runtime that polls this future (feature
    /// `tokio`). It ends only with an error.
    ///
    /// Requests that are made meanwhile wait for the driver's next poll: the requests of all tasks that
    /// are ready now are one batch.
    ///
    /// One task of the engine's thread drives it: a task of a `LocalSet`, or
    /// [`run_until`](Self::run_until). All tasks of that thread may use the engine.
    /// Completions, requests of [`Remote`](crate::Remote)s, deadlines and retries wake the
    /// driver. Callbacks run in it. If the engine has more work than one turn does, other tasks
    /// run between the turns.
    ///
    /// # Errors
    ///
    /// Those of tokio's reactor, if the runtime is shut down or cannot watch the engine's
    /// descriptor.
    ///
    /// # Panics
    ///
    /// Panics if the runtime has no I/O driver (`enable_io`).
    pub async fn drive(&self) -> io::Result<Infallible> {
        let driven = Driven::new(self.core());
        // SAFETY: the engine owns the descriptor, and is borrowed as long as this future lives.
        let fd_events =
            unsafe { AsyncFd::register_with_interest(self.as_fd(), Interest::READABLE) }?;
        let fd = [fd_events.get_ref().as_raw_fd()];
        // An error counts as readable, because an additional turn does no harm.
        let readable = || sys::poll_readable(&fd, Some(Duration::ZERO)).unwrap_or(1) != 0;
        loop {
            let event = poll_fn(|context| {
                if driven.0.driver.take_request() {
                    return Poll::Ready(Ok(None));
                }
                let waker = context.waker().clone(); // user code
                drop(driven.0.driver.replace_waker(Some(waker)));
                fd_events.poll_read_ready(context).map_ok(Some)
            });
            let Some(mut edge) = event.await? else {
                self.turn(); // an edge, if there is one, stays
                continue;
            };
            let mut again = round(|| edge.clear_ready(), || _ = self.turn(), readable);
            while again {
                yield_now().await;
                again = round(|| {}, || _ = self.turn(), readable);
            }
        }
    }

    /// Runs a future on the tokio runtime that polls this one, and [drives](Self::drive) the
    /// engine beside it (feature `tokio`). It is `block_on` for tokio.
    ///
    /// # Errors
    ///
    /// Those of [`drive`](Self::drive). `future` is then dropped.
    pub async fn run_until<F: Future>(&self, future: F) -> io::Result<F::Output> {
        let driven = Driven::new(self.core()); // before the first poll of the driver
        let (mut driver, mut future) = (pin!(self.drive()), pin!(future));
        poll_fn(|context| {
            // The driver, which is polled below, needs no wake-up.
            drop(driven.0.driver.replace_waker(None));
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Ok(output));
            }
            // After the future, so that the driver sees what the future has just submitted.
            match driver.as_mut().poll(context) {
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Ready(Ok(never)) => match never {},
                Poll::Pending => Poll::Pending,
            }
        })
        .await
    }
}

/// Marks the engine as driven. The drop submits the requests that wait for the driver.
struct Driven<'e>(&'e Core);

impl<'e> Driven<'e> {
    fn new(core: &'e Core) -> Self {
        core.driver.set_driven(true);
        Self(core)
    }
}

impl Drop for Driven<'_> {
    fn drop(&mut self) {
        self.0.driver.set_driven(false);
        if self.0.driver.take_request() {
            drop(Plug::new(self.0));
        }
    }
}
