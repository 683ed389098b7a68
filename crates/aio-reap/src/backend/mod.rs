//! What the engine asks of the kernel's interfaces, and the interfaces.
//!
//! # Contract
//!
//! 1. `submit` takes a prefix of the batch, in order; what it took completes exactly once through
//!    `reap`, under the same user data.
//! 2. Until then the backend may use the buffer and the descriptor; afterwards it does not.
//! 3. `reap` never blocks and never submits. Neither runs user code.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use percpu::sync::hint;

use crate::completion_state::CompletionState;
use crate::raw::{RawCompletion, Submitted};
use crate::slab::Batch;

pub(crate) mod aio;
pub(crate) mod device;
pub(crate) mod pool;
mod registered_ring;
pub(crate) mod ring;
pub mod scripted;
pub mod sim;
pub(crate) mod threads;
pub(crate) mod uring;

pub(crate) use device::Device;

pub(crate) trait Backend {
    /// Starts requests, first to last. An empty batch pushes on with the [backlog](Self::backlog).
    fn submit(&mut self, batch: Batch<'_>) -> Submitted;

    /// As `submit`, and then sleeps until a completion is visible, if that is no extra call and the
    /// kernel has the whole batch. Returns whether it may have slept.
    fn submit_and_wait(&mut self, batch: Batch<'_>) -> (Submitted, bool) {
        (self.submit(batch), false)
    }

    /// Hands at most `budget` completions that are visible now to `each`, which does not panic.
    fn reap(&mut self, budget: usize, each: impl FnMut(RawCompletion));

    /// As `reap`, into the books; returns how many.
    fn reap_into(&mut self, budget: usize, completions: &mut CompletionState, now: u64) -> usize {
        let mut found = 0;
        self.reap(budget, |completion| {
            found += 1;
            completions.complete(completion, now);
        });
        found
    }

    /// Sleeps until a completion is likely visible, or `timeout` is over. Spurious returns are
    /// fine; only called while the kernel holds something.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// The engine looked, found nothing and will look again at once.
    fn relax(&mut self) {
        hint::spin_loop();
    }

    /// The engine will sleep on the [descriptors](Self::wake_fds) instead of in `wait`, and no longer
    /// than `timeout`.
    fn before_sleep(&mut self, _timeout: Option<Duration>) {
        self.watch();
    }

    /// From now on somebody polls the [descriptors](Self::wake_fds): they are to be silenced by each
    /// [`acknowledge`](Self::acknowledge), which until then may be too dear. What rang before may
    /// ring on until the next.
    fn watch(&mut self) {}

    /// Lets time pass until a submission is tried again or a wait is over, with nothing in flight;
    /// false where that is real time.
    fn pass(&mut self, _time: Duration) -> bool {
        false
    }

    /// Takes note of wake-ups so far, before a reap that answers them.
    fn acknowledge(&mut self);

    /// Descriptors that are readable when completions may be there; at most two.
    fn wake_fds(&self) -> Vec<RawFd>;

    /// Tries to end an accepted request early; whatever becomes of that, the request completes as
    /// every other. Returns whether anything could be tried.
    fn cancel(&mut self, _user_data: u64) -> bool {
        false
    }

    /// Completions are still to come that belong to no request: a reap removes them.
    fn has_cancellations(&self) -> bool {
        false
    }

    /// Lets the kernel know a file by `number`, or forget it; below
    /// [`MAX_FILES`](crate::registry::MAX_FILES).
    fn register_file(&mut self, _number: u16, _fd: Option<RawFd>) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Lets the kernel know a buffer by `number`, or forget it; below
    /// [`MAX_BUFFERS`](crate::registry::MAX_BUFFERS).
    fn register_buffer(
        &mut self,
        _number: u16,
        _memory: Option<(NonNull<u8>, usize)>,
    ) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Accepted requests that the kernel has not looked at yet.
    fn backlog(&self) -> usize {
        0
    }

    /// The time by which deadlines and timeouts are told.
    fn instant(&self) -> Instant {
        Instant::now()
    }

    /// The time in nanoseconds by which latencies are told.
    fn now(&self) -> u64 {
        crate::sys::now()
    }
}

/// Reads the descriptors' wake-ups into one poll.
pub(crate) fn wait_readable(fds: &[RawFd], timeout: Option<Duration>) -> io::Result<()> {
    crate::sys::poll_readable(fds, timeout).map(drop)
}
