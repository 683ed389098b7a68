//! The locks, one for each slot, that lists share.

use std::fmt;
use std::process;
use std::ptr::NonNull;

use percpu::lglock::{GlobalGuard, LgLock, LocalGuard, LockError, PairGuard};
use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::cpu;
use percpu::{AllocError, CpuId, NodeId, topology};

use percpu::alloc::try_box;

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
    nodes: Box<[Option<NodeId>]>,
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
        let nodes = nodes(cpus, count, slots.as_deref())?;
        let locks = LgLock::try_with_slots(count, |_| ())?;
        let policy = match policy {
            SlotPolicy::Fixed(_) => SlotPolicy::Fixed(count),
            other => other,
        };
        let inner = Inner { users: AtomicUsize::new(1), locks, policy, slots, nodes };
        let inner = try_box(inner).map_err(|_| AllocError::new())?;
        Ok(Self { inner: NonNull::from(Box::leak(inner)) })
    }

    #[inline(always)]
    fn inner(&self) -> &Inner {
        // SAFETY: we are one of its users.
        unsafe { self.inner.as_ref() }
    }

    /// How CPUs are mapped to slots; a fixed number is that of the slots.
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
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.inner == other.inner
    }

    /// The slot of the CPU that the caller runs on.
    #[inline(always)]
    pub(crate) fn current_slot(&self) -> CpuId {
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
        let node = |slot: CpuId| self.inner().nodes.get(slot.index()).copied().flatten();
        node(a).is_some() && node(a) == node(b)
    }

    /// Locks a slot; true beside it if that was taken, and had to be waited for.
    #[inline(always)]
    pub(crate) fn lock(&self, slot: CpuId) -> Result<(LocalGuard<'_, ()>, bool), LockError> {
        self.inner().locks.local_on_counted(slot)
    }

    /// Locks a slot if it is free: never waits.
    pub(crate) fn try_lock(&self, slot: CpuId) -> Result<LocalGuard<'_, ()>, LockError> {
        self.inner().locks.try_local_on(slot)
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

/// The node of each slot whose CPUs are all of one.
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

/// The same domain, and not only one of the same slots.
impl PartialEq for Domain {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other)
    }
}

impl Eq for Domain {}

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
    fn a_domain_has_the_slots_that_its_policy_says() {
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

    /// All slots are used, by CPUs that exist, and each can be locked.
    #[test]
    fn every_cpu_has_a_slot_and_every_slot_a_cpu() {
        for policy in POLICIES {
            let domain = Domain::with_policy(policy);
            let mut used = vec![0; domain.slots()];
            for cpu in cpus() {
                let slot = domain.slot_of(cpu).unwrap();
                used[slot.index()] += 1;
                assert!(!domain.lock(slot).unwrap().1, "nobody has it");
            }
            // A node that has no CPU has a slot all the same.
            let idle = |count: &usize| *count == 0;
            assert!(
                policy == SlotPolicy::PerNode || !used.iter().any(idle),
                "{policy:?}: {used:?}"
            );
            if let SlotPolicy::Fixed(_) = policy {
                let (most, least) = (used.iter().max(), used.iter().min());
                assert!(most.unwrap() - least.unwrap() <= 1, "dealt in turn: {used:?}");
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
    fn a_slot_of_each_node_is_of_that_node() {
        let domain = Domain::with_policy(SlotPolicy::PerNode);
        for cpu in cpus() {
            let slot = domain.slot_of(cpu).unwrap();
            assert_eq!(topology().nodes()[slot.index()], topology().node_of(cpu));
        }
    }

    /// Slots of several nodes' CPUs are of no node, and those of nodes are of one each.
    #[test]
    fn only_slots_of_cpus_share_a_node() {
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
    fn a_slot_that_this_thread_holds_is_refused() {
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
    fn clones_and_lists_are_users_of_a_domain() {
        let domain = Domain::new();
        // Ordering: Relaxed; asked for behind the joins.
        let users = || domain.inner().users.load(Ordering::Relaxed);
        assert!(users() == 1 && !domain.is_same(&Domain::new()));
        let clone = domain.clone();
        assert!(clone.is_same(&domain) && users() == 2);
        let list = crate::PerCpuList::<u8>::new_in(&clone);
        assert!(list.domain().is_same(&domain) && users() == 3);
        drop(clone);
        drop(list.insert(1).unwrap());
        assert_eq!(users(), 2);
        drop(list);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let mine = domain.clone();
                scope.spawn(move || (0..100).for_each(|_| assert!(mine.clone().is_same(&mine))));
            }
        });
        assert_eq!(users(), 1);
    }

    #[test]
    fn it_shows_its_policy_and_slots() {
        let shown = format!("{:?}", Domain::with_policy(SlotPolicy::Fixed(1)));
        assert_eq!(shown, "Domain { policy: Fixed(1), slots: 1, .. }");
    }
}
