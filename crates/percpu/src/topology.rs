//! Which CPUs may ever exist here, and which memory node each belongs to.
//!
//! Read once from `/sys/devices/system/{cpu/possible,node/node*/cpulist}`. The kernel fixes the
//! possible CPUs at boot: a CPU that comes or goes later, or a changed cpuset, moves threads among
//! them and never adds one.
//!
//! # Invariants
//!
//! 1. `capacity` is one more than the largest possible CPU number, so at least 1.
//! 2. `node_of` has `capacity` entries, each of them listed in `nodes`; `nodes` is not empty.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use crate::cpu_id::CpuId;
use crate::cpulist::{CpuList, MAX_CPUS};
use crate::starting::starting;
use crate::sync::native::OnceLock;

/// The number of a memory (NUMA) node, as the kernel counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct NodeId(u32);

/// One past the largest node number we believe (ABI: the kernel's `MAX_NUMNODES` is at most this).
const MAX_NODES: u32 = 1_024;

impl NodeId {
    /// The number itself.
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

/// The CPUs and memory nodes of this machine.
#[derive(Clone, Debug)]
pub struct Topology {
    possible: CpuList,
    capacity: u32,
    nodes: Vec<NodeId>,
    node_of: Box<[NodeId]>,
    guessed: Option<String>,
}

/// Tells which CPUs and memory nodes this machine may ever have.
///
/// The first call reads `/sys` and allocates; callers of the same moment wait for it. Later calls
/// are wait-free.
pub fn topology() -> &'static Topology {
    static TOPOLOGY: OnceLock<Topology> = OnceLock::new();
    if let Some(known) = TOPOLOGY.get() {
        return known;
    }
    let read = || {
        #[cfg(offlock_virtual_cpu)]
        return Topology::read(Path::new("/nonexistent"), || {
            crate::sync::virtual_cpu::possible() as u32
        });
        #[cfg(not(offlock_virtual_cpu))]
        Topology::read(Path::new("/sys/devices/system"), configured_cpus)
    };
    starting(|| TOPOLOGY.get_or_init(read))
}

/// Returns the number of slots that an array indexed by CPU needs: [`Topology::capacity`].
#[inline]
pub fn capacity() -> usize {
    topology().capacity()
}

/// Reads which CPUs are online at this moment.
///
/// Unlike [`Topology::possible`] this changes whenever a CPU is plugged in or out, so the answer
/// may be out of date at once. Reads `/sys` at every call; allocates.
///
/// # Errors
///
/// If `/sys/devices/system/cpu/online` cannot be read, or is not a list of CPUs
/// ([`CpuListError`](crate::CpuListError) inside an error of kind `InvalidInput`).
///
/// ```
/// match percpu::online() {
///     Ok(cpus) => println!("online: {cpus}"),
///     Err(error) => println!("no sysfs here: {error}"),
/// }
/// ```
pub fn online() -> io::Result<CpuList> {
    // Made-up CPUs are there from start to end.
    #[cfg(any(offlock_loom, offlock_shuttle, offlock_virtual_cpu))]
    return Ok(CpuList::first(crate::sync::virtual_cpu::possible() as u32));
    #[cfg(not(any(offlock_loom, offlock_shuttle, offlock_virtual_cpu)))]
    read_list(Path::new("/sys/devices/system/cpu/online"))
}

#[cfg(any(test, not(any(offlock_loom, offlock_shuttle, offlock_virtual_cpu))))]
fn read_list(path: &Path) -> io::Result<CpuList> {
    Ok(fs::read_to_string(path)?.parse::<CpuList>()?)
}

impl Topology {
    /// The possible CPUs: every CPU that is here, or may be plugged in before the next boot. There
    /// may be holes between their numbers.
    #[must_use]
    pub fn possible(&self) -> &CpuList {
        &self.possible
    }

    /// How many slots an array indexed by [`CpuId::index`] needs: the largest possible number and
    /// one, which counts the holes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    pub(crate) fn capacity_u32(&self) -> u32 {
        self.capacity
    }

    /// The memory nodes, ascending; at least one.
    #[must_use]
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// The node whose memory is closest to `cpu`.
    ///
    /// The first node for a CPU of which the kernel says nothing: one that is offline when the
    /// process starts, or that does not exist.
    #[must_use]
    pub fn node_of(&self, cpu: CpuId) -> NodeId {
        self.node_of.get(cpu.index()).copied().unwrap_or(self.nodes[0])
    }

    /// Why the set of possible CPUs is a guess, if `/sys` did not tell.
    #[must_use]
    pub fn guessed(&self) -> Option<&str> {
        self.guessed.as_deref()
    }

    /// Reads `root`, laid out as `/sys/devices/system`; where it does not tell the possible CPUs,
    /// `count` does.
    fn read(root: &Path, count: impl FnOnce() -> u32) -> Self {
        let (possible, guessed) = match possible_cpus(&root.join("cpu/possible")) {
            Ok(list) => (list, None),
            Err(why) => (CpuList::first(count().clamp(1, MAX_CPUS)), Some(why)),
        };
        let capacity = possible.last().map_or(1, |cpu| cpu.get() + 1);
        let (nodes, node_of) = memory_nodes(&root.join("node"), capacity);
        Self { possible, capacity, nodes, node_of, guessed }
    }
}

/// Reads the possible CPUs, at least one, or says why not.
fn possible_cpus(path: &Path) -> Result<CpuList, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let list: CpuList = text.parse().map_err(|e| format!("{}: {e}", path.display()))?;
    match list.is_empty() {
        true => Err(format!("{}: lists no CPU", path.display())),
        false => Ok(list),
    }
}

/// Reads the nodes and the node of each CPU below `capacity`; one node of all where `dir` does not
/// tell.
fn memory_nodes(dir: &Path, capacity: u32) -> (Vec<NodeId>, Box<[NodeId]>) {
    let mut found: Vec<(NodeId, CpuList)> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let id = node_number(entry.file_name().to_str()?)?;
            let text = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            Some((NodeId(id), text.parse().ok()?))
        })
        .collect();
    if found.is_empty() {
        found.push((NodeId(0), CpuList::first(capacity)));
    }
    found.sort_unstable_by_key(|&(node, _)| node);

    let mut node_of = vec![found[0].0; capacity as usize].into_boxed_slice();
    // Downwards, so that the lowest node wins a CPU that two of them list.
    for (node, cpus) in found.iter().rev() {
        for cpu in cpus.iter().take_while(|cpu| cpu.get() < capacity) {
            node_of[cpu.index()] = *node;
        }
    }
    (found.into_iter().map(|(node, _)| node).collect(), node_of)
}

/// The number in a directory name such as `node3`, and in no other.
fn node_number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("node")?;
    let id = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()?;
    (id < MAX_NODES).then_some(id)
}

/// How many CPU numbers there must at least be, without `/sys`: what libc counts, and enough for
/// every CPU this thread may run on.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn configured_cpus() -> u32 {
    const WORDS: usize = MAX_CPUS as usize / 64;

    // SAFETY: takes a number and returns one, -1 for an error.
    let counted = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };

    let mut mask = [0_u64; WORDS];
    // SAFETY: the kernel writes at most `size_of_val(&mask)` bytes, all of which are ours; the type
    // of the pointer does not bound it, as the size is an argument of its own.
    let rc = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    let allowed = if rc == 0 { cpus_up_to_last(&mask) } else { 0 };
    at_least(u32::try_from(counted).unwrap_or(0), allowed)
}

/// One more than the number of the last CPU in an affinity mask; 0 if there is none.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn cpus_up_to_last(mask: &[u64]) -> u32 {
    let last = mask.iter().rposition(|&word| word != 0);
    last.map_or(0, |last| (last as u32 + 1) * u64::BITS - mask[last].leading_zeros())
}

/// The larger of two counts, of which either may be wrong, within reason.
#[cfg(any(test, not(offlock_virtual_cpu)))]
fn at_least(counted: u32, allowed: u32) -> u32 {
    counted.max(allowed).clamp(1, MAX_CPUS)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    /// A directory laid out as `/sys/devices/system`.
    fn sys(possible: Option<&str>, nodes: &[(&str, &str)]) -> TempDir {
        let root = TempDir::new().unwrap();
        if let Some(text) = possible {
            fs::create_dir(root.path().join("cpu")).unwrap();
            fs::write(root.path().join("cpu/possible"), text).unwrap();
        }
        for (name, cpus) in nodes {
            let dir = root.path().join("node").join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("cpulist"), cpus).unwrap();
        }
        root
    }

    fn read(root: &TempDir) -> Topology {
        Topology::read(root.path(), || 6)
    }

    fn nodes(topology: &Topology) -> Vec<u32> {
        topology.nodes().iter().map(|node| node.get()).collect()
    }

    fn node_of(topology: &Topology, cpu: u32) -> u32 {
        topology.node_of(CpuId::new(cpu)).get()
    }

    #[test]
    fn two_sockets() {
        let root = sys(Some("0-3\n"), &[("node0", "0,2\n"), ("node1", "1,3\n"), ("power", "x")]);
        let topology = read(&root);
        assert_eq!(topology.guessed(), None);
        assert_eq!((topology.capacity(), topology.possible().len()), (4, 4));
        assert_eq!(nodes(&topology), [0, 1]);
        let of: Vec<u32> = (0..4).map(|cpu| node_of(&topology, cpu)).collect();
        assert_eq!(of, [0, 1, 0, 1]);
    }

    #[test]
    fn inv01_holes_in_the_cpu_map_count_towards_capacity() {
        let root = sys(Some("0-1,8,10-11\n"), &[("node2", "8-11\n"), ("node7", "0-1\n")]);
        let topology = read(&root);
        assert_eq!((topology.capacity(), topology.possible().len()), (12, 5));
        assert_eq!(nodes(&topology), [2, 7]);
        assert_eq!(node_of(&topology, 1), 7);
        assert_eq!(node_of(&topology, 5), 2, "the first node takes what nobody claims");
        assert_eq!(node_of(&topology, u32::MAX), 2);
    }

    #[test]
    fn without_sysfs_there_is_one_node_and_as_many_cpus_as_counted() {
        let topology = read(&sys(None, &[]));
        assert!(topology.guessed().unwrap().contains("cpu/possible"));
        assert_eq!((topology.capacity(), topology.possible().to_string().as_str()), (6, "0-5"));
        assert_eq!(nodes(&topology), [0]);
        assert_eq!(node_of(&topology, 5), 0);

        let zero = Topology::read(Path::new("/nonexistent"), || 0);
        assert_eq!(zero.capacity(), 1, "there is always a slot");
        let absurd = Topology::read(Path::new("/nonexistent"), || u32::MAX);
        assert_eq!(absurd.capacity(), MAX_CPUS as usize);
    }

    #[test]
    fn garbage_is_a_guess_and_says_so() {
        for (text, why) in [
            ("pony\n", "neither a CPU number nor a range"),
            ("\n", "lists no CPU"),
            ("0-4294967295\n", "no CPU has the number"),
        ] {
            let topology = read(&sys(Some(text), &[("node0", "pony"), ("node0000000x", "0")]));
            assert!(topology.guessed().unwrap().contains(why), "{:?}", topology.guessed());
            assert_eq!(topology.capacity(), 6);
            assert_eq!(nodes(&topology), [0]);
        }
    }

    #[test]
    fn a_cpu_of_two_nodes_goes_to_the_lower_and_one_beyond_capacity_to_none() {
        let root = sys(Some("0-1"), &[("node1", "0-9"), ("node3", "1"), ("node9999", "0")]);
        let topology = read(&root);
        assert_eq!(nodes(&topology), [1, 3]);
        assert_eq!((node_of(&topology, 0), node_of(&topology, 1)), (1, 1));
    }

    #[test]
    fn the_fallback_covers_the_count_and_the_affinity_mask() {
        for (mask, want) in [
            (&[0, 0][..], 0),
            (&[1, 0], 1),
            (&[0b1010, 0], 4),
            (&[1, 1 << 5], 70),
            (&[0, 1 << 63], 128),
        ] {
            assert_eq!(cpus_up_to_last(mask), want, "{mask:?}");
        }
        assert_eq!((at_least(8, 2), at_least(0, 70), at_least(0, 0)), (8, 70, 1));
        assert_eq!(at_least(u32::MAX, 2), MAX_CPUS);

        let all = fs::read_to_string("/proc/self/status").unwrap();
        let allowed = all.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let allowed: CpuList = allowed.unwrap().parse().unwrap();
        assert!(configured_cpus() > allowed.last().unwrap().get());
    }

    #[test]
    fn online_is_a_list_or_an_error() {
        let root = sys(Some("0-2,7\n"), &[]);
        let path = root.path().join("cpu/possible");
        assert_eq!(read_list(&path).unwrap().to_string(), "0-2,7");
        fs::write(&path, "pony").unwrap();
        assert_eq!(read_list(&path).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        fs::remove_file(&path).unwrap();
        assert_eq!(read_list(&path).unwrap_err().kind(), io::ErrorKind::NotFound);

        let online = online().unwrap();
        assert!(!online.is_empty());
        assert!(online.iter().all(|cpu| topology().possible().contains(cpu)), "{online}");
    }

    #[test]
    fn this_machine_has_every_cpu_it_lets_us_use() {
        let topology = topology();
        assert!(topology.capacity() >= configured_cpus() as usize);
        assert!(topology.possible().len() <= topology.capacity());
        assert!(topology.nodes().contains(&topology.node_of(crate::current_cpu())));
    }

    proptest! {
        // Each case makes a directory tree; PROPTEST_CASES overrides the count.
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn inv01_capacity_exceeds_every_possible_id(
            possible in "[0-9]{1,3}(-[0-9]{1,3})?(,[0-9]{1,3}){0,4}|[a-z0-9,-]{0,12}",
            claims in prop::collection::vec((0_u32..8, "[0-9]{1,2}(-[0-9]{1,3})?"), 0..4),
        ) {
            let claims: Vec<(String, String)> =
                claims.into_iter().map(|(id, cpus)| (format!("node{id}"), cpus)).collect();
            let claims: Vec<(&str, &str)> =
                claims.iter().map(|(name, cpus)| (name.as_str(), cpus.as_str())).collect();
            let topology = read(&sys(Some(&possible), &claims));
            prop_assert!(!topology.possible().is_empty());
            for cpu in topology.possible().iter() {
                prop_assert!(cpu.index() < topology.capacity());
                prop_assert!(topology.nodes().contains(&topology.node_of(cpu)));
            }
            prop_assert!(topology.possible().contains(CpuId::new(topology.capacity() as u32 - 1)));
        }
    }
}
