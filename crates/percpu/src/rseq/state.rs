//! [`Sections`]: whether rseq sections run in this process.

use std::fmt;

use crate::cpu::RseqState;

/// Whether rseq sections run in this process, and why not.
///
/// ```
/// match offlock_percpu::capabilities().sections {
///     offlock_percpu::Sections::InUse => {}
///     why => println!("sections {why}"), // for example: sections off: rseq not offered by libc
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sections {
    /// Sections change the per-CPU words, without a locked instruction.
    InUse,
    /// This build has no assembly for sections: another architecture, or `--cfg offlock_portable`.
    NotBuilt,
    /// The build has `--cfg offlock_virtual_cpu`. The kernel protects sections on real CPUs only.
    VirtualCpus,
    /// There is no rseq area, which sections need.
    NoId(RseqState),
    /// The kernel has no `membarrier` command that restarts sections, or a filter refuses it.
    NoBarrier,
    /// The start-up self-test failed, for this reason.
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
