//! The end of a list, of its blocks and of the entries that outlive it.

use std::mem::forget;

use offlock_sync::{model, thoroughly};

use super::world::{ONE, World, ZERO, assert_all_dropped, beside, both_modes, spawn};

#[test]
fn inv13_a_list_ends_beside_its_entry() {
    both_modes(|| {
        let (World { list, drops }, [entry]) = World::alone();
        let there = spawn(ZERO, move || drop(entry));
        drop(list);
        there.join().unwrap();
        assert_all_dropped(&drops);
    });
}

/// The entry and a reference end on two threads, after the list or before.
#[test]
fn inv13_a_list_ends_beside_a_reference() {
    model(|| {
        let (World { list, drops }, [entry]) = World::alone();
        let found = entry.share();
        let there = spawn(ONE, move || assert_eq!(found.read(), 0)); // and drops it
        drop(list);
        assert_eq!(entry.read(), 0);
        drop(entry);
        there.join().unwrap();
        assert_all_dropped(&drops);
    });
}

/// The end of either entry may be the last, which frees the list.
#[test]
fn inv13_the_last_entry_frees_the_list() {
    model(|| {
        let (World { list, drops }, [first, second]) = World::alone();
        drop(list);
        let there = spawn(ONE, move || assert_eq!(first.read(), 0)); // and drops it
        drop(second);
        there.join().unwrap();
        assert_all_dropped(&drops);
    });
}

/// A thread has forgotten its snapshot, and drops entries of two blocks while another thread ends the list: it
/// leaves each to the end of the list, or removes it.
#[test]
fn inv13_a_list_ends_beside_the_thread_of_a_forgotten_snapshot() {
    model(|| {
        let (World { list, drops }, entries) = World::alone::<3>();
        forget(list.lock_all().unwrap());
        let there = spawn(ONE, move || drop(list));
        for (value, entry) in entries.into_iter().enumerate() {
            assert_eq!(entry.read(), value as u64);
            drop(entry);
        }
        there.join().unwrap();
        assert_all_dropped(&drops);
    });
}

/// A second block is empty. A trim frees it while another thread counts the entries.
#[test]
fn inv14_a_trim_meets_a_count() {
    model(|| {
        let (world, [first, second, third]) = World::with();
        drop(third);
        let counts = beside(&world, ONE, |world| assert_eq!(world.list.len(), 2));
        world.list.trim().unwrap();
        counts.join().unwrap();
        world.end([first, second]);
    });
}

/// A walk has found an entry of the second block. The entry is removed and the block freed.
#[test]
fn inv14_a_trim_meets_a_walk() {
    thoroughly(|| {
        let (world, [first, second, third]) = World::with();
        let walks = beside(&world, ONE, |world| {
            let seen: Vec<u64> = world.list.iter().map(|found| found.read()).collect();
            assert!(seen.starts_with(&[0, 1]) && seen.len() <= 3, "{seen:?}");
        });
        drop(third);
        world.list.trim().unwrap();
        walks.join().unwrap();
        world.end([first, second]);
    });
}
