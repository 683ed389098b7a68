//! A domain: the locks of the slots, which lists share.

use std::fmt;

use percpu::alloc::TryArc;
use percpu::lglock::{GlobalGuard, LgLock, LocalGuard, LockError};
use percpu::sync::cpu;
use percpu::{AllocError, CpuId, NodeId, topology};

/// How CPUs map to slots. Each slot has a lock and, for every list, an array.
///
/// ```
/// use percpu_list::{Domain, PerCpuList, SlotPolicy};
///
/// // A walk of these lists takes one lock for each NUMA node.
/// let domain = Domain::with_policy(SlotPolicy::PerNode);
/// let sessions = PerCpuList::<u32>::new_in(&domain);
/// assert_eq!(sessions.domain().policy(), SlotPolicy::PerNode);
/// assert_eq!(Domain::with_policy(SlotPolicy::Fixed(1)).slots(), 1);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotPolicy {
    /// A slot for every CPU. Threads on different CPUs lock the same slot only for removals.
    #[default]
    PerCpu,
    /// A slot for every NUMA node, which the CPUs of the node share. A walk locks fewer slots.
    PerNode,
    /// A fixed number of slots, to which the CPUs are assigned in turn. The number is clamped to
    /// between 1 and the number of CPUs. With 1 slot a list is a plain locked list.
    Fixed(usize),
}

/// A set of locks, one for each slot, for any number of lists.
///
/// A clone is the same domain. An empty list in a shared domain costs 8 bytes for each slot; in a
/// domain of its own it costs a lock on separate cache lines for each slot too. The lists of a
/// domain share its locks, so threads at different lists may wait for each other.
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
#[derive(Clone)]
pub struct Domain {
    inner: TryArc<Inner>,
}

struct Inner {
    locks: LgLock<()>,
    policy: SlotPolicy,
    /// The slot of each CPU. `None` if every CPU has its own.
    slots: Option<Box<[u32]>>,
    /// The node of each slot. `None` for a slot whose CPUs are on several nodes.
    nodes: Box<[Option<NodeId>]>,
}

impl Domain {
    /// Creates a domain with a slot for each CPU.
    ///
    /// # Aborts
    ///
    /// If memory is out, like `Box::new`; [`try_new`](Self::try_new) returns an error instead.
    #[must_use]
    pub fn new() -> Self {
        Self::with_policy(SlotPolicy::PerCpu)
    }

    /// Creates a domain whose slots follow `policy`.
    ///
    /// # Aborts
    ///
    /// If memory is out, like `Box::new`; [`try_with_policy`](Self::try_with_policy) returns an
    /// error instead.
    #[must_use]
    pub fn with_policy(policy: SlotPolicy) -> Self {
        Self::try_with_policy(policy).unwrap_or_else(|_| crate::out_of_memory::<Inner>())
    }

    /// Creates a domain like [`new`](Self::new), and returns an error if there is no memory.
    ///
    /// Allocates 128 bytes for each slot, and a little more. No other method allocates.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
    pub fn try_new() -> Result<Self, AllocError> {
        Self::try_with_policy(SlotPolicy::PerCpu)
    }

    /// Creates a domain like [`with_policy`](Self::with_policy), and returns an error if there is no
    /// memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is out.
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
        let nodes = nodes(cpus, count, slots.as_deref())?;
        let locks = LgLock::try_with_slots(count, |_| ())?;
        let policy = match policy {
            SlotPolicy::Fixed(_) => SlotPolicy::Fixed(count),
            other => other,
        };
        Ok(Self { inner: TryArc::try_new(Inner { locks, policy, slots, nodes })? })
    }

    /// Returns how CPUs map to slots. A fixed number is the actual number of slots.
    #[must_use]
    pub fn policy(&self) -> SlotPolicy {
        self.inner.policy
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.inner.locks.capacity()
    }

    /// Returns whether both are the same domain.
    #[inline(always)]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        TryArc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns the slot of the CPU that the calling thread runs on.
    #[inline(always)]
    pub(crate) fn current_slot(&self) -> CpuId {
        let cpu = cpu::current();
        match &self.inner.slots {
            None => cpu,
            Some(slots) => CpuId::new(slots[cpu.index()]),
        }
    }

    /// Returns the slot of `cpu`.
    #[inline]
    pub(crate) fn slot_of(&self, cpu: CpuId) -> Result<CpuId, LockError> {
        if cpu.index() >= cpu::possible() {
            return Err(LockError::NoSuchCpu(cpu));
        }
        Ok(self.inner.slots.as_ref().map_or(cpu, |slots| CpuId::new(slots[cpu.index()])))
    }

    /// Returns whether all CPUs of two different slots are on one node.
    pub(crate) fn same_node(&self, a: CpuId, b: CpuId) -> bool {
        let node = |slot: CpuId| self.inner.nodes.get(slot.index()).copied().flatten();
        node(a).is_some() && node(a) == node(b)
    }

    /// Locks a slot, and returns whether another thread held it. Blocks in that case.
    #[inline(always)]
    pub(crate) fn lock(&self, slot: CpuId) -> Result<(LocalGuard<'_, ()>, bool), LockError> {
        self.inner.locks.local_on_counted(slot)
    }

    /// Locks a slot if it is free. Never blocks.
    pub(crate) fn try_lock(&self, slot: CpuId) -> Result<LocalGuard<'_, ()>, LockError> {
        self.inner.locks.try_local_on(slot)
    }

    /// Locks all slots, in ascending order.
    pub(crate) fn lock_all(&self) -> Result<GlobalGuard<'_, ()>, LockError> {
        self.inner.locks.global()
    }
}

/// Creates a vector with the capacity `len`.
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

/// Returns the node of each slot, or `None` for a slot whose CPUs are on several nodes.
fn nodes(
    cpus: usize,
    count: usize,
    slots: Option<&[u32]>,
) -> Result<Box<[Option<NodeId>]>, AllocError> {
    let mut nodes = reserved(count)?;
    nodes.extend((0..count).map(|slot| {
        let slot_of = |cpu: usize| slots.map_or(cpu, |slots| slots[cpu] as usize);
        let mut of_slot = (0..cpus)
            .filter(|&cpu| slot_of(cpu) == slot)
            .map(|cpu| topology().node_of(CpuId::new(cpu as u32)));
        let first = of_slot.next();
        first.filter(|&node| of_slot.all(|other| other == node))
    }));
    Ok(nodes.into_boxed_slice())
}

/// Two domains are equal if they are the same domain, not if they have equal slots.
impl PartialEq for Domain {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other)
    }
}

impl Eq for Domain {}

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

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    const POLICIES: [SlotPolicy; 7] = [
        SlotPolicy::PerCpu,
        SlotPolicy::PerNode,
        SlotPolicy::Fixed(0),
        SlotPolicy::Fixed(1),
        SlotPolicy::Fixed(2),
        SlotPolicy::Fixed(3),
        SlotPolicy::Fixed(usize::MAX),
    ];

    fn cpus() -> impl Iterator<Item = CpuId> {
        (0..cpu::possible()).map(|cpu| CpuId::new(cpu as u32))
    }

    #[test]
    fn the_number_of_slots_follows_the_policy() {
        let cpus = cpu::possible();
        for policy in POLICIES {
            let expected = match policy {
                SlotPolicy::PerCpu => cpus,
                SlotPolicy::PerNode => topology().nodes().len(),
                SlotPolicy::Fixed(count) => count.clamp(1, cpus),
            };
            let domain = Domain::with_policy(policy);
            let policy = match policy {
                SlotPolicy::Fixed(_) => SlotPolicy::Fixed(expected),
                other => other,
            };
            assert_eq!((domain.policy(), domain.slots()), (policy, expected));
            assert_eq!(domain.lock_all().unwrap().iter().count(), expected);
        }
        assert_eq!(Domain::default().policy(), SlotPolicy::PerCpu);
    }

    /// Each slot is that of a CPU, and can be locked.
    #[test]
    fn every_cpu_has_a_slot_and_every_slot_a_cpu() {
        for policy in POLICIES {
            let domain = Domain::with_policy(policy);
            let mut used = vec![0; domain.slots()];
            for cpu in cpus() {
                let slot = domain.slot_of(cpu).unwrap();
                used[slot.index()] += 1;
                assert!(!domain.lock(slot).unwrap().1, "no thread holds it");
            }
            // A node without CPUs has a slot too.
            let idle = |count: &usize| *count == 0;
            assert!(
                policy == SlotPolicy::PerNode || !used.iter().any(idle),
                "{policy:?}: {used:?}"
            );
            if let SlotPolicy::Fixed(_) = policy {
                let (most, least) = (used.iter().max(), used.iter().min());
                assert!(most.unwrap() - least.unwrap() <= 1, "assigned in turn: {used:?}");
            }
            assert!(domain.current_slot().index() < domain.slots());
        }
    }

    #[test]
    fn a_cpu_that_cannot_exist_has_no_slot() {
        let none = CpuId::new(cpu::possible() as u32);
        for policy in POLICIES {
            let domain = Domain::with_policy(policy);
            assert_eq!(domain.slot_of(none), Err(LockError::NoSuchCpu(none)));
            let past = CpuId::new(domain.slots() as u32);
            assert!(matches!(domain.lock(past), Err(LockError::NoSuchCpu(_))));
            assert!(matches!(domain.try_lock(past), Err(LockError::NoSuchCpu(_))));
        }
    }

    #[test]
    fn the_slot_of_a_cpu_is_that_of_its_node() {
        let domain = Domain::with_policy(SlotPolicy::PerNode);
        for cpu in cpus() {
            let slot = domain.slot_of(cpu).unwrap();
            assert_eq!(topology().nodes()[slot.index()], topology().node_of(cpu));
        }
    }

    /// A slot with CPUs of several nodes shares a node with no slot.
    #[test]
    fn slots_whose_cpus_are_on_one_node_share_it() {
        for policy in POLICIES {
            let domain = Domain::with_policy(policy);
            for (a, b) in cpus().flat_map(|a| cpus().map(move |b| (a, b))) {
                let (of_a, of_b) = (domain.slot_of(a).unwrap(), domain.slot_of(b).unwrap());
                let of_one = |slot: CpuId| {
                    let here = cpus().filter(|&cpu| domain.slot_of(cpu) == Ok(slot));
                    let mut nodes: Vec<NodeId> = here.map(|cpu| topology().node_of(cpu)).collect();
                    nodes.dedup();
                    nodes.len() == 1
                };
                let same = topology().node_of(a) == topology().node_of(b);
                let expected = same && of_one(of_a) && of_one(of_b);
                assert_eq!(domain.same_node(of_a, of_b), expected, "{policy:?}: {a} and {b}");
            }
        }
        let (domain, none) = (Domain::new(), CpuId::new(u32::MAX));
        assert!(!domain.same_node(none, none) && !domain.same_node(CpuId::new(0), none));
    }

    #[test]
    fn locking_a_slot_twice_is_an_error() {
        let domain = Domain::with_policy(SlotPolicy::Fixed(1));
        let slot = domain.current_slot();
        let held = domain.lock(slot).unwrap();
        assert!(matches!(domain.try_lock(slot), Err(LockError::Deadlock)));
        assert!(matches!(domain.lock(slot), Err(LockError::Deadlock)));
        assert!(domain.lock_all().is_err());
        drop(held);
        assert!(domain.try_lock(slot).is_ok());
    }

    #[test]
    fn clones_and_lists_count_as_references() {
        let domain = Domain::new();
        let refs = || TryArc::references(&domain.inner);
        assert!(refs() == 1 && !domain.is_same(&Domain::new()));
        let clone = domain.clone();
        assert!(clone.is_same(&domain) && refs() == 2);
        let list = crate::PerCpuList::<u8>::new_in(&clone);
        assert!(list.domain().is_same(&domain) && refs() == 3);
        drop(clone);
        drop(list.insert(1).unwrap());
        assert_eq!(refs(), 2);
        drop(list);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let mine = domain.clone();
                scope.spawn(move || (0..100).for_each(|_| assert!(mine.clone().is_same(&mine))));
            }
        });
        assert_eq!(refs(), 1);
    }

    #[test]
    fn debug_prints_the_policy_and_the_slots() {
        let printed = format!("{:?}", Domain::with_policy(SlotPolicy::Fixed(1)));
        assert_eq!(printed, "Domain { policy: Fixed(1), slots: 1, .. }");
    }
}
