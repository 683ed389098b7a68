//! Builds without sections: there are no operations, and the compiler removes the code behind them.

use offlock_sync::atomic::AtomicU64;

use super::operations::{Added, Operations};
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

    fn count(&self, _: &Words, _: u64) -> Added {
        match *self {}
    }
}
