//! The tree against a `BTreeMap`.

use std::collections::BTreeMap;
use std::ptr;

use proptest::prelude::*;

use super::word::Word;
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The floor of an erased key is at least its own floor. It is higher only if another key's is.
    #[test]
    fn inv03_a_tree_is_a_map_whose_floors_only_rise(ops in prop::collection::vec((keys(), any::<bool>(), 1..50_u64), 1..60)) {
        let tree = Tree::new();
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
            // SAFETY: only this thread has the tree.
            let mut cursor = unsafe { tree.cursor(0, u64::MAX) };
            let seen: Vec<_> = std::iter::from_fn(|| cursor.next()).map(|(key, _)| key).collect();
            prop_assert_eq!(seen, present.keys().copied().collect::<Vec<_>>());
        }
    }
}

#[test]
fn the_highest_floor_outlives_the_nodes() {
    let tree = Tree::new();
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
    assert_eq!((edit.floor_of(0), edit.floor_of(7), edit.floor_of(1 << 50)), (12, 12, 12));
}
