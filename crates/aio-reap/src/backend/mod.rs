//! The interface between the engine and the kernel's interfaces, with its implementations.
//!
//! # Contract
//!
//! 1. `submit` takes a prefix of the batch, in order. Each request that it took completes exactly
//!    once through `reap`, with the same user data.
//! 2. Until then the backend may use the buffer and the descriptor; afterwards it does not use
//!    them.
//! 3. `reap` never blocks and never submits. Neither `submit` nor `reap` runs user code.
//! 4. A staged request is the first part of the next `submit`, before its batch. Until then the
//!    backend does not start it, and `unstage` makes the backend forget it. `wait` is not called
//!    while a request is staged, because it may pass the kernel all of the ring.

use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use crate::completion_state::CompletionState;
use crate::op::{RawCompletion, Sub, Submitted};
use crate::slab::Batch;

pub(crate) mod aio;
pub(crate) mod device;
pub mod external;
pub(crate) mod threads;
pub(crate) mod uring;

/// An interface to a device. The module has its contract.
pub(crate) trait Backend {
    /// Starts requests, first to last. An empty batch continues with the [backlog](Self::backlog).
    fn submit(&mut self, batch: Batch<'_>) -> Submitted;

    /// See [`Device::stage`](device::Device::stage).
    #[cold]
    fn stage(&mut self, _request: Sub) -> bool {
        false
    }

    /// Forgets every staged request.
    fn unstage(&mut self) {}

    /// Submits, and then sleeps until a completion is visible, if that needs no extra system call
    /// and the kernel took the whole batch. Returns whether it may have slept.
    fn submit_and_wait(&mut self, batch: Batch<'_>) -> (Submitted, bool) {
        (self.submit(batch), false)
    }

    /// Passes the completions that are visible now to `each`, which does not panic.
    fn reap(&mut self, each: &mut dyn FnMut(RawCompletion));

    /// Reaps into `completions`. Returns the number of completions.
    fn reap_into(&mut self, completions: &mut CompletionState) -> usize {
        let mut found = 0;
        self.reap(&mut |completion| {
            found += 1;
            completions.complete(completion);
        });
        found
    }

    /// Sleeps until a completion is probably visible, or `timeout` is over. It may return early.
    /// Only called while the kernel has a request.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Called before the engine sleeps on the [descriptors](Self::wake_fds) instead of in `wait`,
    /// for at most `timeout`.
    fn before_sleep(&mut self, _timeout: Option<Duration>) {
        self.watch();
    }

    /// Called when the [descriptors](Self::wake_fds) may be polled from now on. Each
    /// [`acknowledge`](Self::acknowledge) must then clear them, which it may omit before to save a
    /// system call. A notification from before may stay until the next `acknowledge`.
    fn watch(&mut self) {}

    /// Advances the time of the device while the engine would sleep with nothing in flight. Returns
    /// false if the device has real time.
    fn advance_time(&mut self, _time: Duration) -> bool {
        false
    }

    /// Clears the descriptors, before a reap that takes the completions.
    fn acknowledge(&mut self);

    /// Returns the descriptors that are readable when completions may be visible; at most two.
    fn wake_fds(&self) -> Vec<RawFd>;

    /// Tries to cancel an accepted request. In any case the request completes like every other.
    /// Returns false if there was no attempt.
    fn cancel(&mut self, _user_data: u64) -> bool {
        false
    }

    /// Returns whether completions of cancellations are outstanding. A reap removes them.
    fn has_cancellations(&self) -> bool {
        false
    }

    /// Returns the number of accepted requests that the kernel has not taken yet.
    fn backlog(&self) -> usize {
        0
    }

    /// Returns whether accepted requests or cancellations wait until the kernel takes them.
    fn has_unsubmitted(&self) -> bool {
        self.backlog() > 0
    }

    /// Returns the time for deadlines and timeouts.
    fn instant(&self) -> Instant {
        Instant::now()
    }
}

/// Sleeps until one of the descriptors is readable or `timeout` is over.
pub(crate) fn wait_readable(fds: &[RawFd], timeout: Option<Duration>) -> io::Result<()> {
    crate::sys::poll_readable(fds, timeout).map(drop)
}
