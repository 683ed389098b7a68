//! The operations of sections, and why a section refuses one.

use crate::cpu::CpuId;
use crate::sync::atomic::AtomicU64;
use crate::words::Words;

/// The reason why a section did not commit. A refused section has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    all(
        not(any(test, offlock_loom, offlock_shuttle)),
        any(not(target_arch = "x86_64"), offlock_portable, offlock_virtual_cpu)
    ),
    expect(dead_code, reason = "without sections `NoCpu` is the only refusal")
)]
pub(crate) enum Refused {
    /// The thread has no CPU id, or this process has no sections: use an atomic instead.
    NoCpu,
    /// The gate held another value than the one with which it is open.
    Closed,
    /// The sum of an `add_within` would leave its bound.
    Busy,
}

/// The operations of one implementation of sections.
///
/// The functions of [`section`](super::section) with the same names describe the operations.
pub(crate) trait Operations {
    fn add(&self, gate: &AtomicU64, open: u64, words: &Words, delta: u64)
    -> Result<CpuId, Refused>;
    fn add_within(
        &self,
        gate: &AtomicU64,
        words: &Words,
        delta: i64,
        bound: i64,
    ) -> Result<CpuId, Refused>;
    fn swap(&self, gate: &AtomicU64, words: &Words, new: u64) -> Result<(CpuId, u64), Refused>;
}
