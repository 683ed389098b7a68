//! The locks of a list, one for each slot. Every CPU has a slot.

use offlock_percpu::lglock::{GlobalGuard, LgLock, LocalGuard, LockError};
use offlock_percpu::{CpuId, current_cpu, topology};

/// The locks of the slots.
#[derive(Debug)]
pub(crate) struct Slots {
    locks: LgLock<()>,
}

impl Slots {
    pub(crate) fn new() -> Self {
        Self { locks: LgLock::new(|_| ()) }
    }

    pub(crate) fn count(&self) -> usize {
        self.locks.capacity()
    }

    /// Returns the slot of the CPU that the calling thread runs on.
    #[inline(always)]
    pub(crate) fn current(&self) -> CpuId {
        current_cpu()
    }

    /// Returns whether two CPUs are on one node.
    pub(crate) fn same_node(&self, a: CpuId, b: CpuId) -> bool {
        topology().node_of(a) == topology().node_of(b)
    }

    /// Locks a slot, and returns whether another thread held it. Blocks in that case.
    #[inline(always)]
    pub(crate) fn lock(&self, slot: CpuId) -> Result<(LocalGuard<'_, ()>, bool), LockError> {
        self.locks.local_on_counted(slot)
    }

    /// Locks all slots, in ascending order.
    pub(crate) fn lock_all(&self) -> Result<GlobalGuard<'_, ()>, LockError> {
        self.locks.global()
    }
}
