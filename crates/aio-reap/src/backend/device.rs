//! The backend of an engine. Each call selects it once, so that its code for each request can be
//! inlined.

use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use super::Backend;
use super::aio::Aio;
use super::external::Staging;
use super::threads::Pool;
use super::uring::Uring;
use crate::completion_state::CompletionState;
use crate::op::{RawCompletion, Sub, Submitted};
use crate::slab::Batch;

/// The backend of an engine. It has a tag of its own, because [`stage`](Backend::stage) reads it for each
/// request and should not derive it from a field.
#[repr(u8)]
pub(crate) enum Device {
    Uring(Uring),
    Aio(Aio),
    Threads(Pool),
    External(Staging),
}

/// Calls a method of the selected backend.
macro_rules! select {
    ($device:expr, $backend:ident => $call:expr) => {
        match $device {
            Device::Uring($backend) => $call,
            Device::Aio($backend) => $call,
            Device::Threads($backend) => $call,
            Device::External($backend) => $call,
        }
    };
}

/// Forwards every method, including those with a default.
impl Backend for Device {
    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        select!(self, backend => backend.submit(batch))
    }

    fn can_stage(&self) -> bool {
        select!(self, backend => backend.can_stage())
    }

    /// Inlined into the front ends, so that a plain request of io_uring stays in registers.
    #[inline(always)]
    fn stage(&mut self, request: Sub) -> bool {
        match self {
            Self::Uring(backend) => backend.stage(request),
            Self::External(backend) => backend.stage(request),
            Self::Aio(_) | Self::Threads(_) => false, // they stage nothing
        }
    }

    fn unstage(&mut self) {
        select!(self, backend => backend.unstage())
    }

    fn submit_and_wait(&mut self, batch: Batch<'_>) -> (Submitted, bool) {
        select!(self, backend => backend.submit_and_wait(batch))
    }

    fn reap(&mut self, each: impl FnMut(RawCompletion)) {
        select!(self, backend => backend.reap(each))
    }

    #[inline]
    fn reap_into(&mut self, completions: &mut CompletionState) -> usize {
        select!(self, backend => backend.reap_into(completions))
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        select!(self, backend => backend.wait(timeout))
    }

    fn before_sleep(&mut self, timeout: Option<Duration>) {
        select!(self, backend => backend.before_sleep(timeout))
    }

    fn advance_time(&mut self, time: Duration) -> bool {
        select!(self, backend => backend.advance_time(time))
    }

    fn watch(&mut self) {
        select!(self, backend => backend.watch())
    }

    fn acknowledge(&mut self) {
        select!(self, backend => backend.acknowledge())
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        select!(self, backend => backend.wake_fds())
    }

    fn backlog(&self) -> usize {
        select!(self, backend => backend.backlog())
    }

    fn has_unsubmitted(&self) -> bool {
        select!(self, backend => backend.has_unsubmitted())
    }

    fn cancel(&mut self, user_data: u64) -> bool {
        select!(self, backend => backend.cancel(user_data))
    }

    fn has_cancellations(&self) -> bool {
        select!(self, backend => backend.has_cancellations())
    }

    fn instant(&self) -> Instant {
        select!(self, backend => backend.instant())
    }
}
