//! [`CpuId`], the number of a CPU.

use std::fmt;

/// The number of a CPU, as the kernel counts CPUs.
///
/// A type of its own, so that a CPU is not mistaken for the number of a node or a count.
///
/// ```
/// # use offlock_sync::CpuId;
/// let cpu = CpuId::new(3);
/// assert_eq!((cpu.get(), cpu.index()), (3, 3));
/// assert_eq!(cpu.to_string(), "cpu 3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct CpuId(u32);

impl CpuId {
    /// Makes the id of CPU `id`, without a check that this CPU exists.
    #[inline]
    #[must_use]
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// Returns the number of the CPU.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the number as the index of a slot. For every id that `current_cpu` returns it is
    /// below the capacity.
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
