//! The red-black tree of an [`RbTree`]: its shape, its order and its nodes.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;

use mq_rbtree::{AllocError, Core, LevelStats, Queue, RbTree};
use proptest::prelude::*;
use testkit::alloc::{Calls, calls, refuse_after, thread_bytes};

#[derive(Clone, Copy, Debug)]
enum Op {
    Send(u16),
    Remove(u16),
    Receive,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    (1_u16..200).prop_flat_map(|keys| {
        let op = prop_oneof![
            4 => (0..keys).prop_map(Op::Send),
            2 => (0..keys).prop_map(Op::Remove),
            2 => Just(Op::Receive),
        ];
        prop::collection::vec(op, 0..300)
    })
}

/// Returns the bytes that `f` allocates minus those that it frees.
fn bytes_of<R>(f: impl FnOnce() -> R) -> (R, i64) {
    let before = thread_bytes();
    let result = f();
    (result, thread_bytes() - before)
}

/// Compares a queue with a `BTreeMap`, and its memory with its nodes. With ageing, each receive serves
/// the greatest key below the one served last, which may have no messages any more.
fn is_as_a_btreemap(ops: Vec<Op>, spare: usize, no_alloc: bool, ageing: bool) {
    let mut builder = Queue::<usize, RbTree<u16>>::builder_with_keys(300).spare_nodes(spare);
    builder = if no_alloc { builder.no_alloc() } else { builder };
    builder = if ageing { builder.ageing(NonZeroU32::MIN) } else { builder };
    let queue = builder.build().unwrap();
    (0..300).for_each(|n| queue.send(n, 0).unwrap()); // allocates all slots
    queue.drain();
    let nodes = || queue.stats().levels.live + queue.stats().levels.kept;
    let most_kept = if no_alloc { 301 } else { spare };
    let bytes_of_levels = |levels| {
        let mut core = Core::<usize, RbTree<u16>>::new(0);
        bytes_of(|| (0..levels).for_each(|key| core.push(key, 0).unwrap())).1
    };
    let node = bytes_of_levels(2) - bytes_of_levels(1);
    let (before, mut bytes) = (nodes() as i64, 0);
    let mut model = BTreeMap::<u16, VecDeque<usize>>::new();
    let mut last = None;
    for (n, op) in ops.into_iter().enumerate() {
        let mut used = |used: i64| bytes += used;
        match op {
            Op::Send(key) => {
                used(bytes_of(|| queue.send(n, key).unwrap()).1);
                model.entry(key).or_default().push_back(n);
            }
            Op::Remove(key) => {
                let (removed, freed) = bytes_of(|| queue.drain_filter(|_, at| at == key).len());
                used(freed);
                assert_eq!(removed, model.remove(&key).map_or(0, |fifo| fifo.len()));
            }
            Op::Receive => {
                let (received, freed) = bytes_of(|| queue.try_receive().ok());
                used(freed);
                let below = last.and_then(|last| model.range(..last).next_back());
                let key = below.or(model.last_key_value()).map(|(&key, _)| key);
                let expected =
                    key.map(|key| (model.get_mut(&key).unwrap().pop_front().unwrap(), key));
                assert_eq!(received, expected);
                last = if ageing { key.or(last) } else { None };
                model.retain(|_, fifo| !fifo.is_empty());
            }
        }
        queue.validate();
        let mut all = Vec::new();
        queue.drain_filter(|&n, key| {
            all.push((key, n));
            false
        });
        let expected =
            model.iter().rev().flat_map(|(&key, fifo)| fifo.iter().map(move |&n| (key, n)));
        assert!(all.into_iter().eq(expected));
        let LevelStats { live, kept, fallback, .. } = queue.stats().levels;
        assert_eq!((live, fallback), (model.len(), 0), "the hint is never out of date here");
        assert!(kept <= most_kept);
        assert_eq!(bytes, (nodes() as i64 - before) * node, "each node is counted");
    }
}

proptest! {
    #[test]
    fn inv03_a_tree_is_as_a_btreemap(
        ops in ops(), spare in 0..4_usize, no_alloc: bool, ageing: bool,
    ) {
        is_as_a_btreemap(ops, spare, no_alloc, ageing);
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

/// With an inconsistent order, each message is removed once, and each node is freed.
#[test]
fn an_inconsistent_order_loses_nothing() {
    let ((), leaked) = bytes_of(|| {
        let mut core = Core::<u32, RbTree<Odd>>::new(3);
        let (mut there, mut removed) = (BTreeSet::new(), Vec::new());
        for n in 0..1_000 {
            core.push(Odd(n * 7_919 % 500), n).unwrap();
            there.insert(n);
            match n % 6 {
                0 => removed.extend(core.pop().map(|(n, _)| n)),
                1 => core.drain_filter(|m, _| m % 97 == n % 97, |n, _| removed.push(n)),
                _ => {}
            }
            removed.drain(..).for_each(|n| assert!(there.remove(&n), "{n} comes twice"));
            assert_eq!(core.len(), there.len());
        }
        assert!(there.len() > 100);
        while let Some((n, _)) = core.pop() {
            assert!(there.remove(&n), "{n} comes twice");
        }
        assert!(there.is_empty());
    });
    assert_eq!(leaked, 0);
}

/// The drop uses constant stack: a test's thread has two MiB.
#[test]
fn a_large_tree_drops() {
    let ((), leaked) = bytes_of(|| {
        let mut core = Core::<u32, RbTree<u32>>::new(0);
        (0..100_000).for_each(|n| core.push(n, n).unwrap());
        core.validate();
    });
    assert_eq!(leaked, 0);
}

/// After `reserve`, nodes are neither allocated nor freed, even in trees that keep few themselves.
#[test]
fn inv04_reserved_levels_need_no_memory() {
    for (spare, there, gone) in
        [(0, 0, 0), (0, 3, 1), (1, 0, 0), (2, 30, 0), (50, 70, 0), (50, 70, 40), (50, 70, 70)]
    {
        let mut core = Core::<u32, RbTree<u32>>::new(spare);
        (0..there).for_each(|n| core.push(1_000 + n, n).unwrap());
        (0..gone).for_each(|_| assert!(core.pop().is_some()));
        core.reserve(20).unwrap();
        let ((), calls) = calls(|| {
            for round in 0..3 {
                (0..30).for_each(|n| core.push(n % 20, n).unwrap());
                core.validate();
                while round > 0 && core.pop().is_some() {}
                core.drain_filter(|_, key| key < 20, |_, _| ());
                core.validate();
            }
            core.reserve(20).unwrap(); // they are there already
        });
        assert_eq!(calls, Calls::NONE, "{spare} {there} {gone}");
    }
}

#[test]
fn reserve_may_fail_and_keeps_what_it_got() {
    let mut core = Core::<u32, RbTree<u32>>::new(0);
    core.push(1, 1).unwrap();
    for impossible in [usize::MAX, usize::MAX - 1, 1 << 32] {
        let refused = (Err(AllocError::new()), Calls::NONE);
        assert_eq!(calls(|| core.reserve(impossible)), refused);
    }
    core.reserve(0).unwrap();
    let sent = refuse_after(3, || {
        assert_eq!(core.reserve(5), Err(AllocError::new()));
        (2..9).take_while(|&n| core.push(n, n).is_ok()).count()
    });
    assert_eq!(sent, 3);
    core.validate();
}
