//! The CPUs that may ever exist on this machine, and the memory node of each.
//!
//! Both are read once from `/sys/devices/system/{cpu/possible,node/node*/cpulist}`. The kernel
//! fixes the possible CPUs at boot. CPU hotplug and a changed cpuset move threads among these CPUs
//! and never add one.
//!
//! # Invariants
//!
//! 1. `capacity` is one more than the largest possible CPU number, so at least 1.
//! 2. `node_of` has `capacity` entries, and `nodes` lists each of them. `nodes` is not empty.

use std::fmt;
use std::fs;
use std::path::Path;

use offlock_sync::CpuId;
use offlock_sync::native::OnceLock;

use crate::cpulist::{CpuList, MAX_CPUS};
use crate::starting::starting;

/// The number of a memory (NUMA) node, as the kernel counts nodes.
///
/// ```
/// let node = offlock_percpu::topology().node_of(offlock_percpu::current_cpu());
/// println!("this thread is on {node}"); // this thread is on node 0
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct NodeId(u32);

/// One past the largest node number that is accepted (ABI: the kernel's `MAX_NUMNODES` is at most
/// this).
const MAX_NODES: u32 = 1_024;

impl NodeId {
    /// Returns the number of the node.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// The CPUs and memory nodes of this machine. See [`topology`].
///
/// ```
/// let topology = offlock_percpu::topology();
/// println!("{} possible CPUs: {}", topology.possible().len(), topology.possible());
/// assert!(topology.possible().iter().all(|cpu| cpu.index() < topology.capacity()));
/// ```
#[derive(Clone, Debug)]
pub struct Topology {
    possible: CpuList,
    capacity: u32,
    nodes: Vec<NodeId>,
    node_of: Box<[NodeId]>,
    guessed: Option<String>,
}

/// Returns the CPUs and memory nodes that this machine may ever have.
///
/// The first call reads `/sys` and allocates. Threads that call at the same time wait for it. Later
/// calls are wait-free.
pub fn topology() -> &'static Topology {
    static TOPOLOGY: OnceLock<Topology> = OnceLock::new();
    if let Some(known) = TOPOLOGY.get() {
        return known;
    }
    let read = || {
        #[cfg(offlock_virtual_cpu)]
        return Topology::read(Path::new("/nonexistent"), || {
            offlock_sync::virtual_cpu::possible() as u32
        });
        #[cfg(not(offlock_virtual_cpu))]
        Topology::read(Path::new("/sys/devices/system"), configured_cpus)
    };
    starting(|| TOPOLOGY.get_or_init(read))
}

/// Returns the number of slots of an array indexed by CPU: [`Topology::capacity`].
#[inline]
pub(crate) fn capacity() -> usize {
    topology().capacity()
}

impl Topology {
    /// Returns the possible CPUs: every CPU that is present, or may be plugged in before the next
    /// boot. Their numbers may have holes.
    #[must_use]
    pub fn possible(&self) -> &CpuList {
        &self.possible
    }

    /// Returns the number of slots of an array indexed by [`CpuId::index`]: one more than the
    /// largest possible number. Holes count.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    pub(crate) fn capacity_u32(&self) -> u32 {
        self.capacity
    }

    /// Returns the memory nodes, ascending. There is at least one.
    #[must_use]
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// Returns the node whose memory is closest to `cpu`.
    ///
    /// Returns the first node if no node lists `cpu`: a CPU that is offline when the process
    /// starts, or that does not exist.
    #[must_use]
    pub fn node_of(&self, cpu: CpuId) -> NodeId {
        self.node_of.get(cpu.index()).copied().unwrap_or(self.nodes[0])
    }

    /// Returns why the set of possible CPUs is a guess, or `None` if it was read from `/sys`.
    #[must_use]
    pub fn guessed(&self) -> Option<&str> {
        self.guessed.as_deref()
    }

    /// Reads `root`, a directory with the layout of `/sys/devices/system`. If it lists no possible
    /// CPUs, they are the first `count()`.
    fn read(root: &Path, count: impl FnOnce() -> u32) -> Self {
        let (possible, guessed) = match possible_cpus(&root.join("cpu/possible")) {
            Ok(list) => (list, None),
            Err(why) => (CpuList::first_n(count().clamp(1, MAX_CPUS)), Some(why)),
        };
        let capacity = possible.last().map_or(1, |cpu| cpu.get() + 1);
        let (nodes, node_of) = memory_nodes(&root.join("node"), capacity);
        Self { possible, capacity, nodes, node_of, guessed }
    }
}

/// Reads the possible CPUs, at least one. The error says why this failed.
fn possible_cpus(path: &Path) -> Result<CpuList, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let list = CpuList::parse(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    match list.is_empty() {
        true => Err(format!("{}: lists no CPU", path.display())),
        false => Ok(list),
    }
}

/// Reads the nodes, and the node of each CPU below `capacity`. If `dir` lists no node, node 0 has
/// all CPUs.
fn memory_nodes(dir: &Path, capacity: u32) -> (Vec<NodeId>, Box<[NodeId]>) {
    let mut found: Vec<(NodeId, CpuList)> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let id = node_number(entry.file_name().to_str()?)?;
            let text = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            Some((NodeId(id), CpuList::parse(&text).ok()?))
        })
        .collect();
    if found.is_empty() {
        found.push((NodeId(0), CpuList::first_n(capacity)));
    }
    found.sort_unstable_by_key(|&(node, _)| node);

    let mut node_of = vec![found[0].0; capacity as usize].into_boxed_slice();
    // Descending, so that a CPU listed by two nodes belongs to the lower.
    for (node, cpus) in found.iter().rev() {
        for cpu in cpus.iter().take_while(|cpu| cpu.get() < capacity) {
            node_of[cpu.index()] = *node;
        }
    }
    (found.into_iter().map(|(node, _)| node).collect(), node_of)
}

/// Returns the number in a directory name such as `node3`, and `None` for any other name.
fn node_number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("node")?;
    let id = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()?;
    (id < MAX_NODES).then_some(id)
}

/// Returns the capacity for a machine without `/sys`: the count of libc, or more if the affinity
/// mask of this thread has a higher CPU.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn configured_cpus() -> u32 {
    const WORDS: usize = MAX_CPUS as usize / 64;

    // SAFETY: takes a number and returns one, -1 for an error.
    let counted = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };

    let mut mask = [0_u64; WORDS];
    // SAFETY: the kernel writes at most `size_of_val(&mask)` bytes, and `mask` has as many. The
    // size is an argument, so the smaller pointee type of the pointer does not matter.
    let rc = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    let allowed = if rc == 0 { cpus_up_to_last(&mask) } else { 0 };
    fallback_capacity(u32::try_from(counted).unwrap_or(0), allowed)
}

/// Returns one more than the number of the last CPU in an affinity mask, or 0 for an empty mask.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn cpus_up_to_last(mask: &[u64]) -> u32 {
    let last = mask.iter().rposition(|&word| word != 0);
    last.map_or(0, |last| (last as u32 + 1) * u64::BITS - mask[last].leading_zeros())
}

/// Returns the larger of two unreliable counts, at least 1 and at most [`MAX_CPUS`].
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn fallback_capacity(counted: u32, allowed: u32) -> u32 {
    counted.max(allowed).clamp(1, MAX_CPUS)
}

#[cfg(test)]
mod tests;
