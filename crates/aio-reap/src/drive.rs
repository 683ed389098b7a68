//! The engine beside other tasks: turned by a loop that is told of edges, as tokio's is.
//!
//! ```text
//!  wait for an edge ─► forget it ─► turn ─► readable? ─ no ─► wait for an edge
//!                                   ▲           └─ yes ─ let others run ─┐
//!                                   └────────────────────────────────────┘
//! ```
//!
//! # Invariants
//!
//! 1. When the driver waits, the descriptor was not readable after the edge was forgotten: whatever
//!    makes it readable later makes another edge.

use percpu::sync::check;

/// What a driver does once it was told of an edge; returns whether it must go on without another.
#[must_use = "the engine may wait for another turn"]
pub fn round(forget: impl FnOnce(), turn: impl FnOnce(), readable: impl FnOnce() -> bool) -> bool {
    forget();
    turn();
    !check!("drive: the turn left nothing", !readable())
}

#[cfg(feature = "tokio")]
mod tokio {
    use std::convert::Infallible;
    use std::future::{Future, poll_fn};
    use std::io;
    use std::os::fd::{AsFd, AsRawFd};
    use std::pin::pin;
    use std::task::Poll;
    use std::time::Duration;

    use ::tokio::io::Interest;
    use ::tokio::io::unix::AsyncFd;
    use ::tokio::task::yield_now;

    use super::round;
    use crate::engine::Engine;
    use crate::sys;

    impl Engine {
        /// Turns the engine whenever it needs that, on the tokio runtime that polls this future
        /// (feature `tokio`). It ends only with an error.
        ///
        /// One task of the engine's thread drives it, and every other of that thread may use it: a
        /// task of a `LocalSet`, or [`run_until`](Self::run_until). Everything that the engine waits
        /// for wakes it: completions, requests of [`Remote`](crate::Remote)s, deadlines and retries.
        /// Callbacks run in it. While the engine has more to do than one turn does, other tasks run
        /// in between.
        ///
        /// # Errors
        ///
        /// Those of tokio's reactor: when the runtime is shut down, or cannot watch the engine's
        /// descriptor.
        ///
        /// # Panics
        ///
        /// Panics if the runtime that polls it has no I/O (`enable_io`).
        pub async fn drive(&self) -> io::Result<Infallible> {
            // SAFETY: the descriptor is the engine's as long as the engine lives, which is borrowed.
            let fd_events =
                unsafe { AsyncFd::register_with_interest(self.as_fd(), Interest::READABLE) }?;
            let fd = [fd_events.get_ref().as_raw_fd()];
            // An error of the look is taken for a yes: one turn too many does no harm.
            let readable = || sys::poll_readable(&fd, Some(Duration::ZERO)).unwrap_or(true);
            loop {
                let mut edge = fd_events.readable().await?;
                let mut again = round(|| edge.clear_ready(), || _ = self.turn(), readable);
                while again {
                    yield_now().await;
                    again = round(|| {}, || _ = self.turn(), readable);
                }
            }
        }

        /// Runs a future on the tokio runtime that polls this one, and [drives](Self::drive) the
        /// engine beside it (feature `tokio`): `block_on` for tokio.
        ///
        /// # Errors
        ///
        /// As [`drive`](Self::drive); `future` is dropped.
        pub async fn run_until<F: Future>(&self, future: F) -> io::Result<F::Output> {
            let (mut driver, mut future) = (pin!(self.drive()), pin!(future));
            poll_fn(|context| {
                if let Poll::Ready(output) = future.as_mut().poll(context) {
                    return Poll::Ready(Ok(output));
                }
                // Behind it, so that what it has just submitted is seen to.
                match driver.as_mut().poll(context) {
                    Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                    Poll::Ready(Ok(never)) => match never {},
                    Poll::Pending => Poll::Pending,
                }
            })
            .await
        }
    }
}
