//! The type of CPU numbers, below every module that has one.

use std::fmt;

/// The number of a CPU, as the kernel counts them.
///
/// A type of its own, so that it is not mistaken for a [`NodeId`](crate::NodeId) or a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct CpuId(u32);

impl CpuId {
    /// Names the CPU `id`. Whether there is one is not checked.
    #[inline]
    #[must_use]
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// The number itself.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number as the index of a slot. Below [`Topology::capacity`](crate::Topology::capacity)
    /// for every id that [`current_cpu`](crate::current_cpu) returns.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl From<u32> for CpuId {
    fn from(id: u32) -> Self {
        Self(id)
    }
}

impl From<CpuId> for u32 {
    fn from(cpu: CpuId) -> Self {
        cpu.0
    }
}

impl fmt::Display for CpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu {}", self.0)
    }
}
