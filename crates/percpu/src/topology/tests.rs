use std::fs;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// Makes a directory with the layout of `/sys/devices/system`.
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
    assert_eq!(node_of(&topology, 5), 2, "the first node has the CPUs that no node lists");
    assert_eq!(node_of(&topology, u32::MAX), 2);
}

#[test]
fn without_sysfs_one_node_has_the_counted_cpus() {
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
fn garbage_gives_a_guess_with_a_reason() {
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
fn cpu_of_two_nodes_belongs_to_the_lower_and_cpu_beyond_capacity_to_none() {
    let root = sys(Some("0-1"), &[("node1", "0-9"), ("node3", "1"), ("node9999", "0")]);
    let topology = read(&root);
    assert_eq!(nodes(&topology), [1, 3]);
    assert_eq!((node_of(&topology, 0), node_of(&topology, 1)), (1, 1));
}

#[test]
fn fallback_covers_the_count_and_the_affinity_mask() {
    for (mask, want) in [
        (&[0, 0][..], 0),
        (&[1, 0], 1),
        (&[0b1010, 0], 4),
        (&[1, 1 << 5], 70),
        (&[0, 1 << 63], 128),
    ] {
        assert_eq!(cpus_up_to_last(mask), want, "{mask:?}");
    }
    assert_eq!(
        (fallback_capacity(8, 2), fallback_capacity(0, 70), fallback_capacity(0, 0)),
        (8, 70, 1)
    );
    assert_eq!(fallback_capacity(u32::MAX, 2), MAX_CPUS);

    let all = fs::read_to_string("/proc/self/status").unwrap();
    let allowed = all.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let allowed = CpuList::parse(allowed.unwrap()).unwrap();
    assert!(configured_cpus() > allowed.last().unwrap().get());
}

#[test]
fn topology_of_this_machine_covers_the_allowed_cpus() {
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
