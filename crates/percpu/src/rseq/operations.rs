//! The operations of sections, and why a section refuses one.

use offlock_sync::CpuId;
use offlock_sync::atomic::AtomicU64;

use crate::words::Words;

/// The reason why a section did not commit. A refused section has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "without sections `NoCpu` is the only refusal")]
pub(crate) enum Refused {
    /// No section can run: the thread has no CPU id, the process runs no sections, or that is not
    /// decided yet. Where sections are [available](super::available), the caller must add to an atomic of its own, never to the
    /// word.
    NoCpu,
    /// The value of the gate was not `open_value`.
    Closed,
}

/// The CPU whose word an add has changed.
pub(crate) type Added = Result<CpuId, Refused>;

/// The operations of one implementation of sections. The functions of the
/// [module above](super) describe them.
pub(crate) trait Operations {
    fn add(&self, gate: &AtomicU64, open_value: u64, words: &Words, delta: u64) -> Added;
    fn count(&self, words: &Words, delta: u64) -> Added;
}
