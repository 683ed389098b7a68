//! Whether rseq sections run in this process.

use std::fmt;

use crate::cpu::RseqState;

/// Whether rseq sections run in this process, and why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sections {
    /// Per-CPU words are changed by sections, without a locked instruction.
    InUse,
    /// This build has no assembly for it: another architecture, or `--cfg offlock_portable`.
    NotBuilt,
    /// `--cfg offlock_virtual_cpu`: the kernel protects real CPUs only.
    VirtualCpus,
    /// There is no rseq area to run them on.
    NoId(RseqState),
    /// The kernel has no `membarrier` that restarts sections, or a filter refuses it.
    NoBarrier,
    /// The self-test failed at this.
    Misbehave(&'static str),
}

impl fmt::Display for Sections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse => f.write_str("in use"),
            Self::NotBuilt => f.write_str("not in this build"),
            Self::VirtualCpus => f.write_str("off: the CPUs are virtual"),
            Self::NoId(rseq) => write!(f, "off: rseq {rseq}"),
            Self::NoBarrier => f.write_str("off: membarrier cannot restart them"),
            Self::Misbehave(what) => write!(f, "off: failed the self-test ({what})"),
        }
    }
}
