//! What this process can use, and why not more.

use std::error::Error;
use std::fmt;
use std::io;

use crate::cpu::{Backend, RseqState, backend};
use crate::fence::{self, Strategy};
use crate::rseq::section;
use crate::rseq::state::Sections;
use crate::sync::native::OnceLock;
use crate::words;

/// What the structures of this crate are built on in this process; `Display` gives one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Where the CPU id comes from.
    pub cpu_id: Backend,
    /// Whether per-CPU words are changed by rseq sections or by atomics.
    pub sections: Sections,
    /// How [`fence::light`] and [`fence::heavy`] are made.
    pub fences: Strategy,
    /// Whether the kernel keeps the memory node's id in the rseq area (Linux 6.3).
    pub node_id: bool,
    /// Whether the kernel keeps a concurrency id in the rseq area (Linux 6.3). It is below the
    /// number of threads at work; it is not a CPU, and this crate does not use it.
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

/// Tells what the structures of this crate are built on in this process.
///
/// Decided once. The first call reads `/sys`, registers the process with membarrier and runs a
/// self-test of the sections; it allocates, and callers of the same moment wait for it. After it
/// nothing else in this crate has a first use that other threads wait for: a program that must not
/// run out of memory there later calls it at its start.
///
/// # Aborts
///
/// The first call, like `Box::new`, if there is no memory for what `/sys` says.
///
/// ```
/// println!("{}", percpu::capabilities());
/// ```
#[must_use]
pub fn capabilities() -> Capabilities {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(words::start);
    let cpu_id = backend();
    let features = if cpu_id.rseq() == RseqState::InUse { feature_size() } else { 0 };
    Capabilities {
        cpu_id,
        sections: section::state(),
        fences: fence::strategy(),
        node_id: features >= NODE_ID_END,
        mm_cid: features >= MM_CID_END,
    }
}

/// Ends of the fields `node_id` and `mm_cid`, in bytes from the start of the area (ABI).
const NODE_ID_END: u64 = 24;
const MM_CID_END: u64 = 28;

/// How many bytes of the area the kernel fills; 0 before Linux 6.3, which does not tell.
fn feature_size() -> u64 {
    const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;
    // SAFETY: reads an entry of the auxiliary vector; 0 if there is none.
    unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) }
}

/// Insists on rseq sections: for a program that would rather not start than run on the fallback.
///
/// # Errors
///
/// [`RseqUnavailable`] says what is missing. Everything works all the same, only slower.
///
/// ```
/// if let Err(why) = percpu::require_rseq() {
///     eprintln!("{why}"); // rseq sections are off: rseq not registered by libc (...)
/// }
/// ```
pub fn require_rseq() -> Result<(), RseqUnavailable> {
    match section::state() {
        Sections::InUse => Ok(()),
        why => Err(RseqUnavailable { why }),
    }
}

/// This process has no rseq sections. Maps to `ENOSYS`, or `EPERM` where something refuses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RseqUnavailable {
    why: Sections,
}

impl RseqUnavailable {
    /// What is missing.
    #[must_use]
    pub fn why(&self) -> Sections {
        self.why
    }

    /// The error as C knows it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self.why {
            Sections::NoId(RseqState::NotRegistered) | Sections::NoBarrier => libc::EPERM,
            _ => libc::ENOSYS,
        }
    }
}

impl fmt::Display for RseqUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rseq sections are {}", self.why)
    }
}

impl Error for RseqUnavailable {}

impl From<RseqUnavailable> for io::Error {
    fn from(error: RseqUnavailable) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_agree_with_each_other() {
        let all = capabilities();
        assert_eq!(all, capabilities(), "decided once");
        assert_eq!(require_rseq().is_ok(), all.sections == Sections::InUse, "{all}");
        if all.sections == Sections::InUse {
            assert_eq!(all.cpu_id.rseq(), RseqState::InUse);
            assert_eq!(all.fences, Strategy::Membarrier);
        }
        assert!(!all.mm_cid || all.node_id, "the kernel added the node first");
    }

    #[test]
    fn inv14_the_reason_is_said_loudly_and_as_an_errno() {
        let off = RseqUnavailable { why: Sections::NoId(RseqState::NotRegistered) };
        assert_eq!(off.errno(), libc::EPERM);
        assert_eq!(
            off.to_string(),
            "rseq sections are off: rseq not registered by libc (switched off or refused)"
        );
        let lied = RseqUnavailable { why: Sections::Misbehave("a closed gate let an add pass") };
        assert!(lied.to_string().contains("closed gate"));
        assert_eq!(io::Error::from(lied).raw_os_error(), Some(libc::ENOSYS));
    }
}
