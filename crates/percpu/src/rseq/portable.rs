//! Builds without sections: there are no operations, and the compiler removes the code behind them.

use offlock_sync::atomic::AtomicU64;

use crate::cpu::CpuId;
use crate::rseq::operations::{Added, Operations, Refused};
use crate::words::Words;

pub(super) fn state() -> Result<(), &'static str> {
    Err(if cfg!(offlock_virtual_cpu) { "the CPUs are virtual" } else { "not in this build" })
}

#[inline(always)]
pub(super) fn available() -> bool {
    false
}

#[inline(always)]
pub(super) fn operations() -> Option<NoOperations> {
    None
}

/// The operations of this build, a type without values.
pub(super) enum NoOperations {}

impl Operations for NoOperations {
    fn add(&self, _: &AtomicU64, _: u64, _: &Words, _: u64) -> Added {
        match *self {}
    }

    fn add_within(&self, _: &AtomicU64, _: &Words, _: i64, _: i64) -> Added {
        match *self {}
    }

    fn swap(&self, _: &AtomicU64, _: &Words, _: u64) -> Result<(CpuId, u64), Refused> {
        match *self {}
    }
}
