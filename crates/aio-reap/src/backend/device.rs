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
use crate::op::{Op, RawCompletion, Sub, Submitted};
use crate::slab::{Batch, Slot};

/// The backend of an engine. It has a tag of its own, because [`stage`](Self::stage) reads it for each
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

/// Implements methods by a call of the selected backend.
macro_rules! forward {
    ($(fn $name:ident(&mut $self:ident $(, $arg:ident: $of:ty)*) $(-> $result:ty)?;)*) => {$(
        fn $name(&mut $self $(, $arg: $of)*) $(-> $result)? {
            select!($self, backend => backend.$name($($arg),*))
        }
    )*};
    ($(fn $name:ident(&$self:ident) -> $result:ty;)*) => {$(
        fn $name(&$self) -> $result {
            select!($self, backend => backend.$name())
        }
    )*};
}

impl Device {
    /// Stores a request for the next `submit`, so that its slot is not read there: the loads would wait
    /// for the stores of its parts. `op` is that of the slot, in registers. Returns false if the request
    /// was not stored. Only called while [`can_stage`](Backend::can_stage), with no call of `submit` or
    /// `cancel` since, for at most as many requests as fit in flight.
    ///
    /// Inlined into the front ends, so that a plain request of io_uring stays in registers.
    #[inline(always)]
    pub(crate) fn stage(&mut self, user_data: u64, op: &Op, slot: &Slot) -> bool {
        match self {
            Self::Uring(backend) => backend.stage(user_data, op),
            other => other.stage_outside(user_data, slot),
        }
    }

    #[cold]
    fn stage_outside(&mut self, user_data: u64, slot: &Slot) -> bool {
        let Self::External(backend) = self else { return false }; // the others stage nothing
        backend.stage(Sub { user_data, op: slot.next_op() });
        true
    }
}

/// Forwards every method, including those with a default.
impl Backend for Device {
    forward! {
        fn submit(&mut self, batch: Batch<'_>) -> Submitted;
        fn unstage(&mut self);
        fn submit_and_wait(&mut self, batch: Batch<'_>) -> (Submitted, bool);
        fn reap(&mut self, each: impl FnMut(RawCompletion));
        fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;
        fn before_sleep(&mut self, timeout: Option<Duration>);
        fn advance_time(&mut self, time: Duration) -> bool;
        fn watch(&mut self);
        fn acknowledge(&mut self);
        fn cancel(&mut self, user_data: u64) -> bool;
    }

    forward! {
        fn can_stage(&self) -> bool;
        fn wake_fds(&self) -> Vec<RawFd>;
        fn backlog(&self) -> usize;
        fn has_unsubmitted(&self) -> bool;
        fn has_cancellations(&self) -> bool;
        fn instant(&self) -> Instant;
    }

    #[inline]
    fn reap_into(&mut self, completions: &mut CompletionState) -> usize {
        select!(self, backend => backend.reap_into(completions))
    }
}
