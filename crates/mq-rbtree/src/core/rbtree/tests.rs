use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use percpu::AllocError;
use proptest::prelude::*;

use super::super::fifo::Fifo;
use super::super::levels::Levels;
use super::{NodeList, NodePtr, RbTree};
use crate::stats::LevelStats;

thread_local! {
    /// Nodes of this thread, in trees or outside.
    static ALIVE: Cell<usize> = const { Cell::new(0) };
    /// Allocations of nodes that this thread attempted.
    static ASKED: Cell<usize> = const { Cell::new(0) };
    /// How many more of them succeed.
    static MEMORY: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// A member of every node that counts the nodes alive.
pub(super) struct Alive(());

impl Alive {
    pub(super) fn new() -> Self {
        ALIVE.set(ALIVE.get() + 1);
        Self(())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        ALIVE.set(ALIVE.get() - 1);
    }
}

/// Called by `try_new_node` before it allocates.
pub(super) fn memory() -> Result<(), AllocError> {
    ASKED.set(ASKED.get() + 1);
    MEMORY.set(MEMORY.get().checked_sub(1).ok_or(AllocError::new())?);
    Ok(())
}

/// A tree used as the queue uses it: with a preload for each operation.
struct TestTree<K>(RbTree<K>);

impl<K: Ord + Copy + fmt::Debug> TestTree<K> {
    fn new(spare: usize) -> Self {
        Self(RbTree::try_new(spare).unwrap())
    }

    /// Makes `name` the only message of a level.
    fn send(&mut self, key: K, name: u32) -> Result<(), AllocError> {
        let mut preload = NodeList::default();
        RbTree::<K>::preload(&self.0.hint(), &mut preload);
        self.send_with(key, name, &mut preload)
    }

    fn send_with(
        &mut self,
        key: K,
        name: u32,
        preload: &mut NodeList<K>,
    ) -> Result<(), AllocError> {
        let level = self.0.get_or_insert(key, preload)?;
        *self.fifo(level) = Fifo { head: name, tail: name, len: 1 };
        Ok(())
    }

    fn fifo(&mut self, level: NodePtr<K>) -> &mut Fifo {
        // SAFETY: the tests use levels that this tree returned, and none after its removal.
        unsafe { self.0.fifo(level) }
    }

    fn key(&self, level: NodePtr<K>) -> K {
        // SAFETY: the tests use levels that this tree returned, and none after its removal.
        unsafe { self.0.priority(level) }
    }

    fn remove_level(&mut self, level: NodePtr<K>, preload: &mut NodeList<K>) {
        *self.fifo(level) = Fifo::EMPTY;
        // SAFETY: the tests use levels that this tree returned, and none after its removal.
        unsafe { self.0.remove(level, preload) };
    }

    fn remove(&mut self, key: K) -> bool {
        let Some(level) = self.0.find(key) else { return false };
        self.remove_level(level, &mut NodeList::default());
        true
    }

    /// Removes the highest level.
    fn pop(&mut self) -> Option<K> {
        let level = self.0.highest()?;
        let key = self.key(level);
        self.remove_level(level, &mut NodeList::default());
        Some(key)
    }

    /// Validates the tree, and returns its keys and names, highest first.
    fn all(&self) -> Vec<(K, u32)> {
        let mut all = Vec::new();
        self.0.validate(|key, fifo| all.push((key, fifo.head)));
        all
    }

    fn stats(&self) -> LevelStats {
        self.0.stats()
    }
}

/// Runs `test`, and asserts that every node was freed once.
fn without_leak(test: impl FnOnce()) {
    assert_eq!(ALIVE.get(), 0);
    test();
    assert_eq!(ALIVE.get(), 0, "every node is freed");
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Send(u16),
    Remove(u16),
    Pop,
    Find(u16),
    Below(u16),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    (1_u16..200).prop_flat_map(|keys| {
        let op = prop_oneof![
            4 => (0..keys).prop_map(Op::Send),
            2 => (0..keys).prop_map(Op::Remove),
            1 => Just(Op::Pop),
            1 => (0..keys).prop_map(Op::Find),
            1 => (0..=keys).prop_map(Op::Below),
        ];
        prop::collection::vec(op, 0..300)
    })
}

proptest! {
    #[test]
    fn inv03_as_a_btreemap(ops in ops(), spare in 0..4_usize, reserved in 0..4_usize) {
        without_leak(|| {
            let mut tree = TestTree::new(spare);
            tree.0.reserve(reserved).unwrap();
            let mut model = BTreeMap::new();
            let mut most = 0;
            for (name, op) in (0..).zip(ops) {
                match op {
                    Op::Send(key) => {
                        tree.send(key, name).unwrap();
                        model.insert(key, name);
                    }
                    Op::Remove(key) => assert_eq!(tree.remove(key), model.remove(&key).is_some()),
                    Op::Pop => assert_eq!(tree.pop(), model.pop_last().map(|(key, _)| key)),
                    Op::Find(key) => {
                        let found = tree.0.find(key).map(|level| tree.fifo(level).head);
                        assert_eq!(found, model.get(&key).copied());
                    }
                    Op::Below(key) => {
                        let below = tree.0.below(key).map(|level| tree.key(level));
                        assert_eq!(below, model.range(..key).next_back().map(|(&key, _)| key));
                    }
                }
                let highest = tree.0.highest().map(|level| tree.key(level));
                assert_eq!(highest, model.keys().next_back().copied());
                assert!(tree.all().into_iter().eq(model.iter().rev().map(|(&key, &name)| (key, name))));
                most = most.max(model.len());
                let LevelStats { live, kept, .. } = tree.stats();
                assert_eq!(live, model.len());
                let bound = if reserved == 0 { spare } else { spare.max(reserved + 1) };
                assert!(kept <= bound);
                // inv02: the nodes are those of the levels and those kept.
                assert_eq!(ALIVE.get(), live + kept);
            }
            assert_eq!(tree.stats().fallback, 0, "the hint is never out of date here");
        });
    }
}

/// Every order of five sends, with every order of five removals.
#[test]
fn inv03_every_order_of_five_levels() {
    fn orders(of: &[u8]) -> Vec<Vec<u8>> {
        if of.is_empty() {
            return vec![vec![]];
        }
        let without = |at: usize| [&of[..at], &of[at + 1..]].concat();
        (0..of.len())
            .flat_map(|at| {
                orders(&without(at)).into_iter().map(move |rest| [&[of[at]], &rest[..]].concat())
            })
            .collect()
    }
    without_leak(|| {
        let orders = orders(&[0, 1, 2, 3, 4]);
        for sent in &orders {
            for removed in &orders {
                let mut tree = TestTree::new(5);
                for &key in sent {
                    tree.send(key, u32::from(key)).unwrap();
                    tree.all();
                }
                for (at, &key) in removed.iter().enumerate() {
                    assert!(tree.remove(key));
                    let left = tree.all();
                    assert_eq!(left.len(), 4 - at);
                    assert!(left.iter().all(|(key, _)| removed[at + 1..].contains(key)));
                }
            }
        }
    });
}

/// A level stays valid while other levels are inserted and removed.
#[test]
fn levels_stay_valid_while_others_change() {
    without_leak(|| {
        let mut tree = TestTree::new(0);
        let at = |key: u32| key.wrapping_mul(0x9e37_79b1) >> 8;
        for key in 0..1000 {
            tree.send(at(key), key).unwrap();
        }
        let levels: Vec<_> = (0..1000).map(|key| tree.0.find(at(key)).unwrap()).collect();
        for key in (0..1000).filter(|key| key % 3 != 0) {
            tree.remove_level(levels[key], &mut NodeList::default());
        }
        tree.all();
        for key in (0..1000_u32).step_by(3) {
            let level = levels[key as usize];
            assert_eq!((tree.key(level), tree.fifo(level).head), (at(key), key));
            assert!(tree.0.find(at(key)) == Some(level));
        }
    });
}

#[test]
fn is_above_is_the_order() {
    assert!(RbTree::is_above(2, 1) && !RbTree::is_above(1, 1) && !RbTree::is_above(1, 2));
    assert_eq!(RbTree::<i8>::check(-128), Ok(()));
}

/// One level at a time reuses the same node.
#[test]
fn inv04_one_level_takes_its_node_from_the_cache() {
    without_leak(|| {
        let mut tree = TestTree::new(1);
        let asked = ASKED.get();
        for round in 0..1000 {
            assert_eq!(tree.stats().from_cache, u64::from(round).saturating_sub(1));
            tree.send(round, round).unwrap();
            assert_eq!(tree.pop(), Some(round));
            assert_eq!(tree.all(), []);
        }
        assert_eq!(ASKED.get() - asked, 1);
        let want = LevelStats { live: 0, kept: 1, from_cache: 999, from_preload: 1, fallback: 0 };
        assert_eq!(tree.stats(), want);
    });
}

/// Without a cache, the node of each level is allocated before the lock and freed after the unlock.
#[test]
fn no_spare_keeps_nothing() {
    without_leak(|| {
        let mut tree = TestTree::new(0);
        for round in 0..10 {
            tree.send(round, 0).unwrap();
            let mut preload = NodeList::default();
            let level = tree.0.highest().unwrap();
            tree.remove_level(level, &mut preload);
            assert_eq!(ALIVE.get(), 1, "in the preload");
            drop(preload);
            assert_eq!(ALIVE.get(), 0);
        }
        let want = LevelStats { live: 0, kept: 0, from_cache: 0, from_preload: 10, fallback: 0 };
        assert_eq!(tree.stats(), want);
    });
}

/// One preload holds the nodes of many removed levels, and a new level takes one of them.
#[test]
fn a_preload_holds_surplus_nodes_for_reuse() {
    without_leak(|| {
        let mut tree = TestTree::new(2);
        for key in 0..100 {
            tree.send(key, 0).unwrap();
        }
        let mut preload = NodeList::default();
        for _ in 0..100 {
            let level = tree.0.highest().unwrap();
            tree.remove_level(level, &mut preload);
            tree.all();
        }
        assert_eq!((tree.stats().kept, ALIVE.get()), (2, 100));
        let before = tree.stats();
        for key in 0..10 {
            tree.send_with(key, 0, &mut preload).unwrap();
        }
        let after = tree.stats();
        // Each level that takes one of the pool's two nodes leaves it room for one of the preload.
        assert_eq!(after.from_cache - before.from_cache, 10);
        assert_eq!(after.from_preload, before.from_preload);
        assert_eq!((after.kept, after.fallback, ALIVE.get()), (2, 0, 100));
        drop(preload);
        assert_eq!(ALIVE.get(), 12);
        tree.all();
    });
}

/// A message is lent without an allocation while the tree keeps a node.
#[test]
fn a_lent_message_takes_a_node_that_is_kept() {
    without_leak(|| {
        let mut tree = TestTree::new(1);
        tree.send(1, 0).unwrap();
        let (level, mut preload) = (tree.0.highest().unwrap(), NodeList::default());
        tree.remove_level(level, &mut preload);
        let asked = ASKED.get();
        tree.0.take_lent_memory(&mut preload).unwrap();
        assert_eq!((tree.stats().kept, tree.stats().fallback, ASKED.get()), (0, 0, asked));
        tree.0.take_lent_memory(&mut preload).unwrap(); // it has it
        assert_eq!((tree.stats().fallback, ASKED.get()), (0, asked));
    });
}

/// A node that was allocated because the hint was out of date is kept, if there is room.
#[test]
fn inv05_an_unused_node_is_kept_or_freed() {
    without_leak(|| {
        let mut tree = TestTree::new(1);
        let [mut first, mut second, mut third] = [(); 3].map(|()| NodeList::default());
        for preload in [&mut first, &mut second, &mut third] {
            RbTree::preload(&tree.0.hint(), preload); // none is kept yet
        }
        assert_eq!(ALIVE.get(), 3);
        tree.send_with(7, 0, &mut first).unwrap();
        tree.send_with(7, 1, &mut second).unwrap();
        assert_eq!((tree.stats().live, tree.stats().kept), (1, 1), "the second's is kept");
        tree.send_with(7, 2, &mut third).unwrap();
        assert_eq!((tree.stats().kept, ALIVE.get()), (1, 3));
        drop((first, second, third));
        assert_eq!(ALIVE.get(), 2, "the third's is freed");
        tree.send(8, 3).unwrap();
        assert_eq!((tree.stats().from_cache, tree.stats().from_preload), (1, 1));

        // The same if the level took a node that was returned in between.
        let mut preload = NodeList::default();
        RbTree::preload(&tree.0.hint(), &mut preload);
        assert_eq!(tree.pop(), Some(8));
        tree.send_with(9, 4, &mut preload).unwrap();
        assert_eq!((tree.stats().from_cache, tree.stats().from_preload), (2, 1));
        drop(preload);
        assert_eq!((tree.stats().kept, ALIVE.get()), (1, 3));
    });
}

#[test]
fn inv06_failures_change_nothing() {
    without_leak(|| {
        let mut tree = TestTree::new(1);
        tree.send(5, 50).unwrap();
        // The allocation before the lock fails, the one under it succeeds.
        let mut preload = NodeList::default();
        MEMORY.set(0);
        RbTree::preload(&tree.0.hint(), &mut preload);
        MEMORY.set(1);
        tree.send_with(6, 60, &mut preload).unwrap();
        assert_eq!((tree.stats().fallback, MEMORY.get()), (1, 0));
        // Both allocations fail.
        let before = tree.stats();
        assert_eq!(tree.send(7, 70), Err(AllocError::new()));
        assert_eq!(tree.stats(), before);
        assert_eq!(tree.all(), [(6, 60), (5, 50)]);
        // No memory is needed for a level that exists, nor for one whose node is kept.
        tree.send(5, 51).unwrap();
        assert_eq!(tree.pop(), Some(6));
        tree.send(8, 80).unwrap();
        assert_eq!(tree.all(), [(8, 80), (5, 51)]);
        MEMORY.set(usize::MAX);
    });
}

/// After `reserve`, nodes are neither allocated nor freed, even in trees that keep few themselves.
#[test]
fn inv04_reserved_levels_need_no_memory() {
    for (spare, there, gone) in
        [(0, 0, 0), (0, 3, 1), (1, 0, 0), (2, 30, 0), (50, 70, 0), (50, 70, 40), (50, 70, 70)]
    {
        without_leak(|| {
            let mut tree = TestTree::new(spare);
            for key in 1000..1000 + there {
                tree.send(key, key).unwrap();
            }
            for _ in 0..gone {
                tree.pop();
            }
            tree.0.reserve(20).unwrap();
            tree.all();
            let (alive, asked) = (ALIVE.get(), ASKED.get());
            for round in 0..3 {
                for key in 0..20 {
                    tree.send(key, 0).unwrap();
                    tree.send(key, 1).unwrap(); // its level exists: no allocation
                    tree.all();
                    assert_eq!(ALIVE.get(), alive);
                }
                while round > 0 && tree.pop().is_some() {
                    tree.all();
                    assert_eq!(ALIVE.get(), alive);
                }
                (0..20).for_each(|key| assert_eq!(tree.remove(key), round == 0));
            }
            let LevelStats { live, kept, fallback, .. } = tree.stats();
            assert_eq!((live, kept, fallback), (0, alive, 0));
            tree.0.reserve(20).unwrap();
            assert_eq!(ASKED.get(), asked, "they are there already");
        });
    }
}

#[test]
fn reserve_may_fail_and_keeps_what_it_got() {
    without_leak(|| {
        let mut tree = TestTree::new(0);
        tree.send(1, 1).unwrap();
        for impossible in [usize::MAX, usize::MAX - 1, usize::MAX / 8] {
            assert_eq!(tree.0.reserve(impossible), Err(AllocError::new()));
        }
        tree.0.reserve(0).unwrap();
        assert_eq!(tree.stats().kept, 0);
        MEMORY.set(3);
        assert_eq!(tree.0.reserve(5), Err(AllocError::new()));
        assert_eq!(tree.stats().kept, 3);
        tree.all();
        for key in 2..5 {
            tree.send(key, 0).unwrap();
        }
        assert_eq!(tree.send(5, 0), Err(AllocError::new()));
        while tree.pop().is_some() {}
        assert_eq!(tree.stats().kept, 4, "the bound holds what was there");
        MEMORY.set(usize::MAX);
        tree.all();
    });
}

thread_local! {
    /// The number of comparisons before one panics.
    static FUSE: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// A key whose comparison panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fused(u32);

impl Ord for Fused {
    fn cmp(&self, other: &Self) -> Ordering {
        let left = FUSE.get().checked_sub(1);
        FUSE.set(left.expect("the fuse has blown"));
        self.0.cmp(&other.0)
    }
}

impl PartialOrd for Fused {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Runs `op` so that each of its comparisons panics in turn, then without a panic. Returns the
/// number of comparisons.
fn blow_each<R>(mut op: impl FnMut() -> R, mut after_panic: impl FnMut()) -> usize {
    for fuse in 0.. {
        FUSE.set(fuse);
        let result = catch_unwind(AssertUnwindSafe(&mut op));
        FUSE.set(usize::MAX);
        if result.is_ok() {
            return fuse;
        }
        after_panic();
    }
    unreachable!("the operation ends")
}

/// Whichever comparison panics, the tree is unchanged.
#[test]
fn a_panicking_order_changes_nothing() {
    for key in [0, 31, 50, 99, 200].map(Fused) {
        without_leak(|| {
            let tree = RefCell::new(TestTree::new(2));
            for key in 0..50 {
                tree.borrow_mut().send(Fused(2 * key), key).unwrap();
            }
            let (all, stats) = (tree.borrow().all(), tree.borrow().stats());
            let unchanged = || {
                assert_eq!(tree.borrow().all(), all);
                assert_eq!(tree.borrow().stats(), stats);
            };
            assert!(blow_each(|| tree.borrow().0.below(key), unchanged) >= 4);
            assert!(blow_each(|| tree.borrow().0.find(key), unchanged) >= 1);
            let preload = RefCell::new(NodeList::default());
            RbTree::preload(&tree.borrow().0.hint(), &mut preload.borrow_mut());
            let send = || tree.borrow_mut().send_with(key, 1000, &mut preload.borrow_mut());
            let blown = blow_each(send, || {
                unchanged();
                assert_eq!(ALIVE.get(), 51, "the preload has its node");
            });
            assert!(blown >= 1);
            assert_eq!(ALIVE.get(), 51, "in the tree, or kept");
            assert!(tree.borrow().all().contains(&(key, 1000)));
        });
    }
}

/// A key whose order is a hash of both sides, so that it is inconsistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Odd(u32);

impl Ord for Odd {
    fn cmp(&self, other: &Self) -> Ordering {
        let mixed = (self.0 << 16 | other.0).wrapping_mul(0x9e37_79b1) >> 20;
        match mixed % 64 {
            0 => Ordering::Equal,
            odd if odd % 2 == 1 => Ordering::Less,
            _ => Ordering::Greater,
        }
    }
}

impl PartialOrd for Odd {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// With an inconsistent order the tree holds together: every level is removed once.
#[test]
fn an_inconsistent_order_loses_nothing() {
    fn check(tree: &TestTree<Odd>, mut want: Vec<u32>) {
        let mut names = Vec::new();
        tree.0.tree.validate_links(|at| names.push(at.fifo().head));
        names.sort_unstable();
        want.sort_unstable();
        assert_eq!(names, want);
    }
    without_leak(|| {
        let mut tree = TestTree::new(3);
        let mut there = Vec::new();
        for name in 0..1000 {
            let key = Odd(name * 7919 % 500);
            let level = tree.0.get_or_insert(key, &mut NodeList::default()).unwrap();
            // The level is new, or any of the existing ones.
            let old = mem::replace(tree.fifo(level), Fifo { head: name, tail: name, len: 1 });
            if !old.is_empty() {
                there.retain(|&name| name != old.head);
            }
            there.push(name);
            let gone = if name % 2 == 0 { tree.0.find(key) } else { tree.0.below(key) };
            if let Some(level) = gone.filter(|_| name % 3 == 0) {
                let head = tree.fifo(level).head;
                tree.remove_level(level, &mut NodeList::default());
                there.retain(|&name| name != head);
            }
            check(&tree, there.clone());
        }
        assert!(there.len() > 100);
        while let Some(level) = tree.0.highest() {
            let head = tree.fifo(level).head;
            tree.remove_level(level, &mut NodeList::default());
            there.retain(|&name| name != head);
            check(&tree, there.clone());
        }
        assert_eq!((there.len(), ALIVE.get()), (0, 3));
    });
}

/// The drop uses constant stack: a test's thread has two MiB.
#[test]
fn a_large_tree_drops() {
    without_leak(|| {
        let mut tree = TestTree::new(0);
        for key in 0..100_000 {
            tree.send(key, 0).unwrap();
        }
        assert_eq!(tree.all().len(), 100_000);
        assert_eq!(ALIVE.get(), 100_000);
    });
}

/// The tree and its preload move between threads if the keys do.
const _: () = {
    const fn send<T: Send>() {}
    send::<RbTree<Cell<u8>>>();
    send::<NodeList<Cell<u8>>>();
    send::<NodePtr<Cell<u8>>>();
};
