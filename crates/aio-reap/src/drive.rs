//! The loops that turn an engine for others: the driver beside other tasks in an edge-triggered event
//! loop such as tokio's, and the server of other threads' requests.
//!
//! ```text
//!  wait for an edge ─► clear it ─► turn ─► readable? ─ no ─► wait for an edge
//!                                  ▲           └─ yes ─ run other tasks ─┐
//!                                  └─────────────────────────────────────┘
//! ```
//!
//! # Invariants
//!
//! 1. When the driver waits, the descriptor was not readable at some time after the edge was
//!    cleared. An event that makes it readable later makes another edge.
//! 2. [`serve`] ends by a turn that began without a sender. The load that saw the last one gone
//!    carries every request that was sent, so that turn took them.

use percpu::sync::check;

/// Performs one round of a driver after an edge. Returns whether another round must follow without
/// an edge.
#[must_use = "the engine may wait for another turn"]
pub fn round(
    clear_edge: impl FnOnce(),
    turn: impl FnOnce(),
    readable: impl FnOnce() -> bool,
) -> bool {
    clear_edge();
    turn();
    !check!("drive: the turn left nothing", !readable())
}

/// The end of a turn of [`serve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// Completions were delivered, so another turn may find more work.
    Progress,
    /// Requests are left.
    Busy,
    /// No request is left.
    Idle,
}

/// Turns an engine until it has no sender and no request.
///
/// # Errors
///
/// Returns the error of `sleep`.
pub fn serve<E>(
    has_senders: impl Fn() -> bool,
    mut turn: impl FnMut() -> Served,
    mut sleep: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    loop {
        // Checked before the turn: invariant 2.
        let alone = check!("serve: no sender is left", !has_senders());
        match turn() {
            Served::Progress => continue,
            Served::Idle if alone => return Ok(()),
            Served::Idle | Served::Busy => {}
        }
        // If the last sender left during the turn, the turn may have cleared its notification.
        if alone || check!("serve: a sender will notify", has_senders()) {
            sleep()?;
        }
    }
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
        /// Turns the engine whenever needed, on the tokio runtime that polls this future (feature
        /// `tokio`). It ends only with an error.
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
            // SAFETY: the engine owns the descriptor, and is borrowed as long as this future lives.
            let fd_events =
                unsafe { AsyncFd::register_with_interest(self.as_fd(), Interest::READABLE) }?;
            let fd = [fd_events.get_ref().as_raw_fd()];
            // An error counts as readable, because an additional turn does no harm.
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
        /// engine beside it (feature `tokio`). It is `block_on` for tokio.
        ///
        /// # Errors
        ///
        /// Those of [`drive`](Self::drive). `future` is then dropped.
        pub async fn run_until<F: Future>(&self, future: F) -> io::Result<F::Output> {
            let (mut driver, mut future) = (pin!(self.drive()), pin!(future));
            poll_fn(|context| {
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
}
