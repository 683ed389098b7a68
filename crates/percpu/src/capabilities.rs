//! The mechanisms that this process can use, and why it lacks the rest.

use std::fmt;

use crate::cpu::{Backend, RseqState, backend};
use crate::error::impl_error;
use crate::fence::{self, Strategy};
use crate::rseq::section;
use crate::rseq::state::Sections;
use crate::sync::native::OnceLock;
use crate::words;

/// The mechanisms that the structures of this crate use in this process. `Display` gives one line.
///
/// See [`capabilities`].
///
/// ```
/// let found = offlock_percpu::capabilities();
/// if found.fences == offlock_percpu::fence::Strategy::Fences {
///     eprintln!("no membarrier: {found}");
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The source of CPU ids.
    pub cpu_id: Backend,
    /// Whether per-CPU words are changed by rseq sections or by atomics.
    pub sections: Sections,
    /// How [`fence::light`] and [`fence::heavy`] work.
    pub fences: Strategy,
    /// Whether the kernel keeps the id of the memory node in the rseq area (Linux 6.3).
    pub node_id: bool,
    /// Whether the kernel keeps a concurrency id in the rseq area (Linux 6.3). The id is below the
    /// number of running threads. It is no CPU number, and this crate does not use it.
    pub mm_cid: bool,
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu_id, sections, fences, node_id, mm_cid } = self;
        let yes = |there: bool| if there { "yes" } else { "no" };
        write!(f, "{cpu_id}; sections {sections}; heavy fence by {fences}; ")?;
        write!(f, "node id {}, mm_cid {}", yes(*node_id), yes(*mm_cid))
    }
}

/// Returns the mechanisms that the structures of this crate use in this process.
///
/// Decided once. The first call reads `/sys`, registers the process with membarrier and runs a
/// self-test of the sections. It allocates, and threads that call at the same time wait for it.
/// Afterwards no other first use in this crate makes threads wait. A program that cannot afford to
/// run out of memory later calls this function at its start.
///
/// # Aborts
///
/// The first call aborts like `Box::new` if there is no memory for the contents of `/sys`.
///
/// ```
/// println!("{}", offlock_percpu::capabilities());
/// ```
#[must_use]
pub fn capabilities() -> Capabilities {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(words::start);
    let cpu_id = backend();
    let features = if cpu_id.rseq() == RseqState::InUse { feature_size() } else { 0 };
    let [node_id, mm_cid] = fields(features);
    Capabilities { cpu_id, sections: section::state(), fences: fence::strategy(), node_id, mm_cid }
}

/// Returns whether an area of `size` bytes contains the fields `node_id` and `mm_cid` (ABI).
fn fields(size: u64) -> [bool; 2] {
    [24, 28].map(|end| end <= size)
}

/// Returns how many bytes of the area the kernel fills. Linux before 6.3 does not report it: 0.
fn feature_size() -> u64 {
    const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;
    // SAFETY: reads an entry of the auxiliary vector; the result is 0 if there is none.
    unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) }
}

/// Returns an error if this process runs no rseq sections.
///
/// For a program that must not run on the slower fallback.
///
/// # Errors
///
/// [`RseqUnavailable`] names the missing part. The crate works without it, but is slower.
///
/// ```
/// if let Err(error) = offlock_percpu::require_rseq() {
///     eprintln!("{error}"); // rseq sections are off: rseq not registered by libc (...)
/// }
/// ```
pub fn require_rseq() -> Result<(), RseqUnavailable> {
    match section::state() {
        Sections::InUse => Ok(()),
        reason => Err(RseqUnavailable { reason }),
    }
}

/// The error of [`require_rseq`]: this process runs no rseq sections. Maps to `EPERM` if libc, the
/// kernel or a filter refused them, otherwise to `ENOSYS`.
///
/// ```
/// if let Err(error) = offlock_percpu::require_rseq() {
///     println!("{:?}, errno {}", error.reason(), error.errno());
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RseqUnavailable {
    reason: Sections,
}

impl RseqUnavailable {
    /// Returns the reason why this process runs no rseq sections.
    #[must_use]
    pub fn reason(&self) -> Sections {
        self.reason
    }
}

impl_error! {
    [] RseqUnavailable {
        Self { reason: reason @ (Sections::NoId(RseqState::NotRegistered) | Sections::NoBarrier) }
            => EPERM, "rseq sections are {reason}";
        Self { reason } => ENOSYS, "rseq sections are {reason}";
    }
}

#[cfg(test)]
mod tests;
