//! The operations of sections, and why a section refuses one.

use offlock_sync::atomic::AtomicU64;

use crate::cpu::CpuId;
use crate::words::Words;

/// The reason why a section did not commit. A refused section has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    all(
        not(any(test, offlock_model)),
        any(not(target_arch = "x86_64"), offlock_portable, offlock_virtual_cpu)
    ),
    expect(dead_code, reason = "without sections `NoCpu` is the only refusal")
)]
pub(crate) enum Refused {
    /// No section can run: the thread has no CPU id, the process runs no sections, or that is not
    /// decided yet. Where [`available`](super::section::available), the caller must add to an atomic
    /// of its own, never to the word.
    NoCpu,
    /// The value of the gate was not `open_value`.
    Closed,
    /// The sum of an `add_within` would not be between its bounds.
    OutOfRange,
}

/// The CPU whose word an add has changed.
pub(crate) type Added = Result<CpuId, Refused>;

/// The operations of one implementation of sections.
///
/// The functions of [`section`](super::section) with the same names describe the operations.
pub(crate) trait Operations {
    fn add(&self, gate: &AtomicU64, open_value: u64, words: &Words, delta: u64) -> Added;
    fn add_within(&self, gate: &AtomicU64, words: &Words, delta: i64, bound: i64) -> Added;
    fn swap(&self, gate: &AtomicU64, words: &Words, new: u64) -> Result<(CpuId, u64), Refused>;
}
