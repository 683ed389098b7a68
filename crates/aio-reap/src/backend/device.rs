//! The backend an engine runs on, told apart once per call, so that what it does for each request
//! can be inlined.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::Backend;
use super::aio::Aio;
use super::scripted::Scripted;
use super::sim::Simulated;
use super::threads::Threads;
use super::uring::Uring;
use crate::completion_state::CompletionState;
use crate::raw::{RawCompletion, Submitted};
use crate::slab::Batch;

pub(crate) enum Device {
    Uring(Uring),
    Aio(Aio),
    Threads(Threads),
    Scripted(Scripted),
    Simulated(Simulated),
}

/// Calls the same method of whichever it is.
macro_rules! each {
    ($device:expr, $backend:ident => $call:expr) => {
        match $device {
            Device::Uring($backend) => $call,
            Device::Aio($backend) => $call,
            Device::Threads($backend) => $call,
            Device::Scripted($backend) => $call,
            Device::Simulated($backend) => $call,
        }
    };
}

/// All of them, also those with a default.
impl Backend for Device {
    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        each!(self, backend => backend.submit(batch))
    }

    fn submit_and_wait(&mut self, batch: Batch<'_>) -> (Submitted, bool) {
        each!(self, backend => backend.submit_and_wait(batch))
    }

    fn reap(&mut self, budget: usize, each: impl FnMut(RawCompletion)) {
        each!(self, backend => backend.reap(budget, each))
    }

    #[inline]
    fn reap_into(&mut self, budget: usize, completions: &mut CompletionState, now: u64) -> usize {
        each!(self, backend => backend.reap_into(budget, completions, now))
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        each!(self, backend => backend.wait(timeout))
    }

    fn relax(&mut self) {
        each!(self, backend => backend.relax())
    }

    fn before_sleep(&mut self, timeout: Option<Duration>) {
        each!(self, backend => backend.before_sleep(timeout))
    }

    fn pass(&mut self, time: Duration) -> bool {
        each!(self, backend => backend.pass(time))
    }

    fn watch(&mut self) {
        each!(self, backend => backend.watch())
    }

    fn acknowledge(&mut self) {
        each!(self, backend => backend.acknowledge())
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        each!(self, backend => backend.wake_fds())
    }

    fn backlog(&self) -> usize {
        each!(self, backend => backend.backlog())
    }

    fn cancel(&mut self, user_data: u64) -> bool {
        each!(self, backend => backend.cancel(user_data))
    }

    fn has_cancellations(&self) -> bool {
        each!(self, backend => backend.has_cancellations())
    }

    fn register_file(&mut self, number: u16, fd: Option<RawFd>) -> io::Result<()> {
        each!(self, backend => backend.register_file(number, fd))
    }

    fn register_buffer(
        &mut self,
        number: u16,
        memory: Option<(NonNull<u8>, usize)>,
    ) -> io::Result<()> {
        each!(self, backend => backend.register_buffer(number, memory))
    }

    fn instant(&self) -> Instant {
        each!(self, backend => backend.instant())
    }

    fn now(&self) -> u64 {
        each!(self, backend => backend.now())
    }
}
