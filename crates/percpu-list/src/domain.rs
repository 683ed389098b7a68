//! The locks, one for each slot, that lists share.

use std::fmt;
use std::process;
use std::ptr::NonNull;

use percpu::lglock::{GlobalGuard, LgLock, LocalGuard, LockError, PairGuard};
use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::cpu;
use percpu::{AllocError, CpuId, NodeId, topology};

use crate::alloc::try_box;

/// How CPUs are mapped to slots, each of which has a lock and, for every list, an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotPolicy {
    /// A slot for every CPU: what runs on different CPUs meets at removals only.
    #[default]
    PerCpu,
    /// A slot for every NUMA node: fewer slots to walk and to lock, shared by the node's CPUs.
    PerNode,
    /// That many slots, dealt to CPUs in turn; at least 1, which is a plain locked list, and at most
    /// as many as CPUs.
    Fixed(usize),
}

/// A set of locks, one for each slot, for any number of lists.
///
/// A clone is the same domain. Lists that share one cost 8 bytes for each slot while they are empty,
/// instead of a lock on a cache line of its own; what they pay is that they share locks. Entries of
/// intrusive lists may move among the lists of their domain.
///
/// ```
/// use percpu_list::{Domain, PerCpuList};
///
/// let domain = Domain::new();
/// let exports: Vec<PerCpuList<u32>> = (0..1000).map(|_| PerCpuList::new_in(&domain)).collect();
/// let entry = exports[7].insert(1)?;
/// assert_eq!((exports[7].len(), exports[8].len()), (1, 0));
/// # drop(entry);
/// # Ok::<(), percpu_list::InsertError<u32>>(())
/// ```
pub struct Domain {
    /// Lives until the last of its `users` is dropped, of which this is one. Not an `Arc`, which
    /// cannot be made without ending the process when there is no memory.
    inner: NonNull<Inner>,
}

// SAFETY: a shared reference to a `Sync` value, and a count; the last to go may be on any thread.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

struct Inner {
    users: AtomicUsize,
    locks: LgLock<()>,
    policy: SlotPolicy,
    /// The slot of each CPU, unless that is its own.
    slots: Option<Box<[u32]>>,
    /// The node of each slot, where a slot is of one node.
    nodes: Option<Box<[NodeId]>>,
}

impl Domain {
    /// Makes a domain with a slot for each CPU.
    ///
    /// # Aborts
    ///
    /// Like `Box::new`, if there is no memory; [`try_new`](Self::try_new) returns that.
    #[must_use]
    pub fn new() -> Self {
        Self::with_policy(SlotPolicy::PerCpu)
    }

    /// Makes a domain with the slots that `policy` says.
    ///
    /// # Aborts
    ///
    /// As [`new`](Self::new).
    #[must_use]
    pub fn with_policy(policy: SlotPolicy) -> Self {
        Self::try_with_policy(policy).unwrap_or_else(|_| crate::out_of_memory::<Inner>())
    }

    /// Makes a domain with a slot for each CPU.
    ///
    /// Allocates 128 bytes for each slot, and some; nothing later.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new() -> Result<Self, AllocError> {
        Self::try_with_policy(SlotPolicy::PerCpu)
    }

    /// Makes a domain with the slots that `policy` says.
    ///
    /// # Errors
    ///
    /// As [`try_new`](Self::try_new).
    pub fn try_with_policy(policy: SlotPolicy) -> Result<Self, AllocError> {
        let cpus = cpu::possible();
        let (count, slots) = match policy {
            SlotPolicy::PerCpu => (cpus, None),
            SlotPolicy::PerNode => {
                let nodes = topology().nodes();
                let slot = |cpu| {
                    let node = topology().node_of(cpu);
                    nodes.iter().position(|&other| other == node).unwrap_or(0)
                };
                (nodes.len().max(1), Some(table(cpus, slot)?))
            }
            SlotPolicy::Fixed(count) => {
                let count = count.clamp(1, cpus);
                (count, Some(table(cpus, |cpu| cpu.index() % count)?))
            }
        };
        let nodes = match policy {
            SlotPolicy::PerCpu => {
                let mut nodes = reserved(cpus)?;
                nodes.extend((0..cpus).map(|cpu| topology().node_of(CpuId::new(cpu as u32))));
                Some(nodes.into_boxed_slice())
            }
            _ => None,
        };
        let locks = LgLock::try_with_slots(count, |_| ())?;
        let inner = Inner { users: AtomicUsize::new(1), locks, policy, slots, nodes };
        let inner = try_box(inner).map_err(|_| AllocError::new())?;
        Ok(Self { inner: NonNull::from(Box::leak(inner)) })
    }

    #[inline(always)]
    fn inner(&self) -> &Inner {
        // SAFETY: we are one of its users.
        unsafe { self.inner.as_ref() }
    }

    /// How CPUs are mapped to slots.
    #[must_use]
    pub fn policy(&self) -> SlotPolicy {
        self.inner().policy
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.inner().locks.capacity()
    }

    /// True if they are one domain.
    #[inline(always)]
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.inner == other.inner
    }

    /// The slot of the CPU that the caller runs on.
    #[inline(always)]
    pub(crate) fn here(&self) -> CpuId {
        let cpu = cpu::current();
        match &self.inner().slots {
            None => cpu,
            Some(slots) => CpuId::new(slots[cpu.index()]),
        }
    }

    /// The slot of `cpu`.
    #[inline]
    pub(crate) fn slot_of(&self, cpu: CpuId) -> Result<CpuId, LockError> {
        if cpu.index() >= cpu::possible() {
            return Err(LockError::NoSuchCpu(cpu));
        }
        Ok(self.inner().slots.as_ref().map_or(cpu, |slots| CpuId::new(slots[cpu.index()])))
    }

    /// Whether two different slots are of one node.
    pub(crate) fn same_node(&self, a: CpuId, b: CpuId) -> bool {
        let node = |slot: CpuId| self.inner().nodes.as_ref()?.get(slot.index());
        node(a).is_some() && node(a) == node(b)
    }

    /// Locks a slot; true beside it if that was taken, and had to be waited for.
    #[inline(always)]
    pub(crate) fn lock(&self, slot: CpuId) -> Result<(LocalGuard<'_, ()>, bool), LockError> {
        match self.inner().locks.try_local_on(slot) {
            Ok(guard) => Ok((guard, false)),
            Err(LockError::WouldBlock) => self.wait(slot),
            Err(error) => Err(error),
        }
    }

    #[cold]
    #[inline(never)]
    fn wait(&self, slot: CpuId) -> Result<(LocalGuard<'_, ()>, bool), LockError> {
        Ok((self.inner().locks.local_on(slot)?, true))
    }

    /// Locks a slot if it is free. As [`lock`](Self::lock), but never waits.
    pub(crate) fn try_lock(&self, slot: CpuId) -> Result<(LocalGuard<'_, ()>, bool), LockError> {
        Ok((self.inner().locks.try_local_on(slot)?, false))
    }

    /// Locks two different slots.
    pub(crate) fn lock_pair(&self, a: CpuId, b: CpuId) -> Result<PairGuard<'_, ()>, LockError> {
        self.inner().locks.pair(a, b)
    }

    /// Locks all slots.
    pub(crate) fn lock_all(&self) -> Result<GlobalGuard<'_, ()>, LockError> {
        self.inner().locks.global()
    }
}

/// A vector with memory for `len`.
fn reserved<T>(len: usize) -> Result<Vec<T>, AllocError> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(len).map_err(|_| AllocError::new())?;
    Ok(vec)
}

fn table(cpus: usize, slot: impl Fn(CpuId) -> usize) -> Result<Box<[u32]>, AllocError> {
    let mut table = reserved(cpus)?;
    table.extend((0..cpus).map(|cpu| slot(CpuId::new(cpu as u32)) as u32));
    Ok(table.into_boxed_slice())
}

impl Clone for Domain {
    fn clone(&self) -> Self {
        // Ordering: Relaxed; the caller's own use keeps it alive.
        if self.inner().users.fetch_add(1, Ordering::Relaxed) > isize::MAX as usize {
            process::abort(); // as `Arc` does: forgotten users by the billion
        }
        Self { inner: self.inner }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Ordering: AcqRel. Release pairs with the Acquire of the last to go; it carries our uses.
        // Acquire: theirs.
        if self.inner().users.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: the last user; from `leak`.
            drop(unsafe { Box::from_raw(self.inner.as_ptr()) });
        }
    }
}

impl Default for Domain {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain")
            .field("policy", &self.policy())
            .field("slots", &self.slots())
            .finish_non_exhaustive()
    }
}
