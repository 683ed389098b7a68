//! The backend of an engine.

use std::ops::{Deref, DerefMut};

use super::{Backend, uring::Uring};
use crate::op::{Op, Sub};
use crate::slab::Slot;

/// The backend of an engine. io_uring has a variant of its own, so that [`stage`](Self::stage) is
/// inlined; the tag is a field, because `stage` reads it for each request.
#[repr(u8)]
pub(crate) enum Device {
    Uring(Uring),
    Other(Box<dyn Backend>),
}

impl Device {
    /// Stores a request for the next `submit`, so that its slot is not read there: the loads would wait
    /// for the stores of its parts. `op` is that of the slot, in registers. Returns false if the request
    /// was not stored. Only called if [`has_unsubmitted`](Self::has_unsubmitted) was false, and `submit` and
    /// `cancel` have not been called since, for at most as many requests as fit in flight.
    ///
    /// Inlined into the front ends, so that a plain request of io_uring stays in registers.
    #[inline(always)]
    pub(crate) fn stage(&mut self, user_data: u64, op: &Op, slot: &Slot) -> bool {
        match self {
            Self::Uring(backend) => backend.stage_plain(user_data, op),
            Self::Other(backend) => backend.stage(Sub { user_data, op: slot.next_op() }),
        }
    }

    /// See [`Backend::has_unsubmitted`]. Inlined for io_uring, because each round of the engine asks.
    #[inline]
    pub(crate) fn has_unsubmitted(&self) -> bool {
        match self {
            Self::Uring(backend) => backend.has_unsubmitted(),
            Self::Other(backend) => backend.has_unsubmitted(),
        }
    }
}

impl Deref for Device {
    type Target = dyn Backend;

    #[inline]
    fn deref(&self) -> &Self::Target {
        match self {
            Self::Uring(backend) => backend,
            Self::Other(backend) => &**backend,
        }
    }
}

impl DerefMut for Device {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Uring(backend) => backend,
            Self::Other(backend) => &mut **backend,
        }
    }
}
