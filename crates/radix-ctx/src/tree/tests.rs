//! The tree against a `BTreeMap`, with floors and without.

use std::collections::BTreeMap;
use std::ptr;

use proptest::prelude::*;

use super::word::{MARKS, MAX_HEIGHT};
use super::*;

fn entry(value: u64) -> Word {
    ptr::without_provenance_mut((value << 2) as usize)
}

/// Keys at the limits of levels, and some between them.
fn keys() -> impl Strategy<Value = u64> {
    // Keys that often meet, so that a tree becomes empty or has a single entry again.
    let few = [0, 0, 1, 63, 64, 130, 4_096, u64::MAX];
    prop_oneof![
        10 => prop::sample::select(few.to_vec()),
        1 => 0..200_u64,
        1 => (0..64_u32, -2..3_i64).prop_map(|(bit, by)| (1_u64 << bit).wrapping_add_signed(by)),
        1 => (0..3_u64).prop_map(|by| u64::MAX - by),
        1 => 0..5000_u64,
        1 => any::<u64>(),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Set(u64, u64),
    Clear(u64),
    Abandon(u64),
    Mark(u64, usize, bool),
    Full(u64, bool),
    Next(u64, u64),
    Keep(u8),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        5 => (keys(), 1..1_000_u64).prop_map(|(key, value)| Op::Set(key, value)),
        4 => keys().prop_map(Op::Clear),
        1 => keys().prop_map(Op::Abandon),
        2 => (keys(), 0..MARKS, any::<bool>()).prop_map(|(key, mark, on)| Op::Mark(key, mark, on)),
        2 => (keys(), any::<bool>()).prop_map(|(key, on)| Op::Full(key, on)),
        2 => (keys(), keys()).prop_map(|(from, to)| Op::Next(from, to)),
        1 => (0..4_u8).prop_map(Op::Keep),
    ];
    prop::collection::vec(op, 1..80)
}

#[derive(Clone, Copy, Debug, Default)]
struct Expected {
    value: u64,
    marks: [bool; MARKS],
    full: bool,
}

fn check(ops: &[Op]) -> Result<(), TestCaseError> {
    let mut tree = Tree::<false>::new();
    let mut map = BTreeMap::<u64, Expected>::new();
    for op in ops {
        // SAFETY: only this thread has the tree.
        let edit = unsafe { tree.edit() };
        match *op {
            Op::Set(key, value) => {
                let slot = edit.make_slot(key).unwrap();
                let old = edit.set(slot, entry(value));
                let had = map.entry(key).or_default();
                prop_assert_eq!(old, entry(had.value));
                had.value = value;
            }
            Op::Clear(key) => {
                let old = edit.slot(key).map_or(ptr::null_mut(), |s| edit.set(s, ptr::null_mut()));
                prop_assert_eq!(old, entry(map.remove(&key).unwrap_or_default().value));
            }
            Op::Abandon(key) => edit.abandon(edit.make_slot(key).unwrap()),
            Op::Mark(key, mark, on) => {
                if let Some(slot) = edit.slot(key) {
                    let done = if on { edit.set_mark(slot, mark) } else { false };
                    if !on {
                        edit.clear_mark(slot, mark);
                    }
                    prop_assert_eq!(done, on && map.contains_key(&key));
                }
                if let Some(had) = map.get_mut(&key) {
                    had.marks[mark] = on;
                }
            }
            Op::Full(key, on) => {
                if let Some(had) = map.get_mut(&key) {
                    let slot = edit.slot(key).unwrap();
                    if on {
                        edit.set_full(slot)
                    } else {
                        edit.clear_full(slot)
                    }
                    had.full = on;
                }
            }
            Op::Next(from, to) => {
                let mut room = from;
                while map.get(&room).is_some_and(|had| had.full) && room < to {
                    room += 1;
                }
                let is_room = from <= to && !map.get(&room).is_some_and(|had| had.full);
                prop_assert_eq!(edit.first_not_full(from, to), is_room.then_some(room));
                let wanted = edit.nodes_wanted(from.min(to), to);
                prop_assert!(from < to || wanted <= 2 * MAX_HEIGHT);
            }
            Op::Keep(nodes) => {
                edit.fill_pool(nodes.into()).unwrap();
                if nodes == 0 {
                    edit.empty_pool();
                }
            }
        }
        prop_assert_eq!(edit.validate(), Ok(()));
        drop(edit.finish());
        compare(&tree, &map, op)?;
    }
    let mut left = Vec::new();
    tree.destroy(|key, word| left.push((key, word)));
    prop_assert_eq!(left, map.iter().map(|(&k, e)| (k, entry(e.value))).collect::<Vec<_>>());
    prop_assert_eq!(tree.node_count(), 0);
    Ok(())
}

fn compare(
    tree: &Tree<false>,
    map: &BTreeMap<u64, Expected>,
    op: &Op,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(tree.is_empty(), map.is_empty());
    let key = match *op {
        Op::Set(key, _) | Op::Clear(key) | Op::Abandon(key) | Op::Mark(key, ..) => key,
        Op::Full(key, _) | Op::Next(key, _) => key,
        Op::Keep(_) => 0,
    };
    for key in [key, key.wrapping_add(1), key.wrapping_sub(1), 0, u64::MAX] {
        let had = map.get(&key).copied().unwrap_or_default();
        // SAFETY: only this thread has the tree.
        prop_assert_eq!(unsafe { tree.load(key) }, entry(had.value));
        for mark in 0..MARKS {
            // SAFETY: only this thread has the tree.
            prop_assert_eq!(unsafe { tree.is_marked(key, mark) }, had.marks[mark]);
        }
        let mut room = key;
        while map.get(&room).is_some_and(|had| had.full) && room < u64::MAX {
            room += 1;
        }
        let is_room = !map.get(&room).is_some_and(|had| had.full);
        // SAFETY: only this thread has the tree.
        let edit = unsafe { tree.edit() };
        prop_assert_eq!(edit.first_not_full(key, u64::MAX), is_room.then_some(room));
        let next = map.range(key..).next().map(|(&key, had)| (key, entry(had.value)));
        // SAFETY: only this thread has the tree.
        prop_assert_eq!(unsafe { tree.next(key, u64::MAX, Filter::Present) }, next);
        let prev = map.range(..=key).next_back().map(|(&key, had)| (key, entry(had.value)));
        // SAFETY: only this thread has the tree.
        prop_assert_eq!(unsafe { tree.prev(key) }, prev);
    }
    for filter in [Filter::Present, Filter::Mark(0), Filter::Mark(2)] {
        let wanted = |had: &Expected| match filter {
            Filter::Present => true,
            Filter::Mark(mark) => had.marks[mark],
        };
        for (from, to) in [(0, u64::MAX), (key, u64::MAX), (0, key), (key / 2, key)] {
            // SAFETY: only this thread has the tree.
            let mut cursor = unsafe { tree.cursor(from, to, filter) };
            let seen: Vec<_> = std::iter::from_fn(|| cursor.next()).collect();
            let all = map.range(from..=to).filter(|(_, had)| wanted(had));
            prop_assert_eq!(seen, all.map(|(&k, e)| (k, entry(e.value))).collect::<Vec<_>>());
        }
        if let Filter::Mark(mark) = filter {
            // SAFETY: only this thread has the tree.
            prop_assert_eq!(unsafe { tree.any_marked(mark) }, map.values().any(wanted));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn inv03_a_tree_is_a_map(ops in ops()) {
        check(&ops)?;
    }

    /// The floor of an erased key is at least its own floor. It is higher only if another key's is.
    #[test]
    fn floors_only_rise(ops in prop::collection::vec((keys(), any::<bool>(), 1..50_u64), 1..60)) {
        let tree = Tree::<true>::new();
        let mut floors = BTreeMap::<u64, u64>::new();
        let mut present = BTreeMap::<u64, u64>::new();
        for (key, on, by) in ops {
            // SAFETY: only this thread has the tree.
            let edit = unsafe { tree.edit() };
            let floor = edit.floor_of(key);
            if !present.contains_key(&key) {
                prop_assert!(floor >= floors.get(&key).copied().unwrap_or(0));
            }
            if on {
                edit.set(edit.make_slot(key).unwrap(), entry(by));
                present.insert(key, by);
            } else if present.remove(&key).is_some() {
                let floor = floors.get(&key).copied().unwrap_or(0) + by;
                floors.insert(key, floor);
                let slot = edit.slot(key).unwrap();
                edit.set(slot, floor_word(floor));
            } else {
                edit.abandon(edit.make_slot(key).unwrap());
            }
            prop_assert_eq!(edit.validate(), Ok(()));
            let highest = floors.values().copied().max().unwrap_or(0);
            for (&key, &floor) in &floors {
                if !present.contains_key(&key) {
                    let found = edit.floor_of(key);
                    prop_assert!((floor..=highest).contains(&found));
                }
            }
            for (&key, &value) in &present {
                // SAFETY: only this thread has the tree.
                prop_assert_eq!(unsafe { tree.load(key) }, entry(value));
                prop_assert_eq!(edit.floor_of(key), 0);
            }
            drop(edit.finish());
            prop_assert_eq!(tree.is_empty(), present.is_empty());
            // SAFETY: only this thread has the tree.
            let mut cursor = unsafe { tree.cursor(0, u64::MAX, Filter::Present) };
            let seen: Vec<_> = std::iter::from_fn(|| cursor.next()).map(|(key, _)| key).collect();
            prop_assert_eq!(seen, present.keys().copied().collect::<Vec<_>>());
        }
    }
}

/// A tree without nodes has no way down to keep, and a range from 0 contains the way down of any other.
#[test]
fn a_range_from_zero_wants_exactly_its_nodes() {
    let tree = Tree::<false>::new();
    // SAFETY: only this thread has the tree.
    let edit = unsafe { tree.edit() };
    let wanted = || [63, 64, 4_095].map(|to| edit.nodes_wanted(0, to));
    assert_eq!(wanted(), [1, 3, 65]);
    edit.set(edit.make_slot(1).unwrap(), entry(1));
    assert_eq!((tree.height(), wanted()), (1, [0, 2, 64]));
}

#[test]
fn an_entry_at_zero_needs_no_node() {
    let tree = Tree::<false>::new();
    // SAFETY: only this thread has the tree.
    let edit = unsafe { tree.edit() };
    edit.set(edit.make_slot(0).unwrap(), entry(1));
    assert_eq!((tree.height(), tree.bytes()), (0, 0));
    edit.set(edit.make_slot(u64::MAX).unwrap(), entry(2));
    assert_eq!(tree.height(), 11);
    assert_eq!(tree.node_count(), 21, "one root, and two ways down");
    edit.set(edit.slot(u64::MAX).unwrap(), ptr::null_mut());
    assert_eq!((tree.height(), tree.bytes()), (0, 0));
}

#[test]
fn the_highest_floor_outlives_the_nodes() {
    let tree = Tree::<true>::new();
    // SAFETY: only this thread has the tree.
    let edit = unsafe { tree.edit() };
    for key in [0, 1, 64, 4096] {
        edit.set(edit.make_slot(key).unwrap(), entry(1));
    }
    edit.set(edit.slot(4096).unwrap(), floor_word(9));
    assert_eq!(edit.floor_of(4096), 9);
    assert_eq!(edit.floor_of(1 << 40), 9, "shrinking keeps the highest for all above");
    assert_eq!(edit.floor_of(65), 0, "but not for what was not covered");
    edit.set(edit.slot(64).unwrap(), floor_word(3));
    assert_eq!(edit.floor_of(65), 9);
    edit.set(edit.slot(1).unwrap(), floor_word(5));
    edit.set(edit.slot(0).unwrap(), floor_word(7));
    assert_eq!((edit.floor_of(0), edit.floor_of(1), tree.height()), (7, 9, 0));
    edit.set(edit.make_slot(5).unwrap(), entry(1));
    assert_eq!((edit.floor_of(0), edit.floor_of(1)), (9, 9), "the root's floor is one for all");
    edit.set(edit.slot(5).unwrap(), floor_word(12));
    assert!(tree.is_empty());
    assert_eq!((edit.floor_of(0), edit.floor_of(7), edit.floor_of(1 << 50)), (12, 12, 12));
}
