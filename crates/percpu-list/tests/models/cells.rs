//! Walks beside removals: marks, pins, and cells that are used again.

use offlock_percpu::CpuId;
use offlock_sync::virtual_cpu::{set_current, take_id};
use offlock_sync::{model, thoroughly};

use super::world::{ONE, World, ZERO, beside, both_modes, spawn};

fn walk_meets_removal(cpu: CpuId) {
    both_modes(move || {
        let (world, [goes]) = World::with();
        let removes = spawn(cpu, move || drop(goes));
        set_current(ONE);
        assert!([&[0][..], &[]].contains(&&*world.walk()));
        removes.join().unwrap();
        world.end([]);
    });
}

#[test]
fn inv07_a_walk_meets_a_removal_on_the_same_cpu() {
    walk_meets_removal(ZERO);
}

#[test]
fn inv07_a_walk_meets_a_removal_on_another_cpu() {
    walk_meets_removal(ONE);
}

/// A thread that reads a slot during the first addition there finds no block, or a complete one.
#[test]
fn inv07_a_walk_meets_the_first_addition_of_a_slot() {
    both_modes(|| {
        let (world, []) = World::with();
        let reader = beside(&world, ONE, |world| {
            assert!(world.list.len() <= 1);
            world.list.iter().for_each(|found| assert_eq!(found.read(), 1));
        });
        let comes = world.add(1);
        reader.join().unwrap();
        world.end([comes]);
    });
}

/// The walk has marked the first entry. The second is in its cell when the walk pins it.
#[test]
fn inv07_a_walk_meets_a_cell_that_is_reused() {
    model(|| {
        let (world, [goes]) = World::with();
        let changes = beside(&world, ZERO, move |world| {
            drop(goes);
            let keeps = world.add(1);
            drop((world.add(2), keeps));
        });
        set_current(ONE);
        assert!(world.walk().iter().all(|value| *value < 3));
        changes.join().unwrap();
        world.end([]);
    });
}

/// The walk has found an entry, and restarted the sections. Then the cell gets the next entry, which
/// the walk reads.
#[test]
fn inv07_a_walk_meets_the_next_entry_of_a_cell() {
    thoroughly(|| {
        let (world, [goes]) = World::with();
        let changes = beside(&world, ZERO, move |world| {
            drop(goes);
            world.add(1)
        });
        set_current(ONE);
        assert!(world.walk().iter().all(|value| *value < 2));
        let comes = changes.join().unwrap();
        world.end([comes]);
    });
}

/// The walk found an entry that another CPU has freed since, and pins its cell for a moment, while
/// the CPU of the block takes the cell back.
#[test]
fn inv07_a_refill_meets_the_pin_of_a_stale_walk() {
    model(|| {
        let (world, [goes, stays]) = World::with();
        let walks = beside(&world, ONE, |world| {
            assert!(world.walk().iter().all(|value| *value < 3));
        });
        set_current(ONE);
        drop(goes);
        set_current(ZERO);
        let comes = world.add(2);
        walks.join().unwrap();
        world.end([comes, stays]);
    });
}

/// The value stays readable after the removal of its entry, although its block is full.
#[test]
fn inv07_a_pinned_cell_is_not_reused() {
    both_modes(|| {
        let (world, [goes, stays]) = World::with(); // fills the first block
        let found = goes.share();
        let removes = spawn(ONE, move || drop(goes));
        let comes = world.add(2);
        assert_eq!((found.read(), comes.read()), (0, 2));
        drop(found);
        removes.join().unwrap();
        world.end([comes, stays]);
    });
}

/// The last reference to a value ends on another CPU, and its cell is used again.
#[test]
fn inv07_a_cell_is_reused_after_the_last_unpin() {
    both_modes(|| {
        let (world, [goes, stays]) = World::with();
        let found = goes.share();
        drop(goes);
        let ends = spawn(ONE, move || assert_eq!(found.read(), 0)); // and drops it
        let comes = world.add(2);
        ends.join().unwrap();
        world.end([comes, stays]);
    });
}

/// Another CPU has freed a cell of the block, so the block is refilled while an entry leaves its list
/// and stays pinned. Both cells that are free now are taken.
#[test]
fn inv07_a_refill_beside_a_pinned_cell() {
    model(|| {
        let (world, [goes, other]) = World::with();
        let found = goes.share();
        set_current(ONE);
        drop(other);
        set_current(ZERO);
        let removes = spawn(ONE, move || drop(goes));
        let come = [2, 3].map(|value| world.add(value));
        assert_eq!((found.read(), come[0].read(), come[1].read()), (0, 2, 3));
        removes.join().unwrap();
        drop(found);
        world.end(come);
    });
}

/// The block is refilled while the last pin of an entry that is off its list ends.
#[test]
fn inv07_a_refill_beside_the_last_unpin() {
    model(|| {
        let (world, [goes, other]) = World::with();
        let found = goes.share();
        drop(goes);
        set_current(ONE);
        drop(other);
        set_current(ZERO);
        let ends = spawn(ONE, move || assert_eq!(found.read(), 0)); // and drops it
        let come = [2, 3].map(|value| world.add(value));
        assert_eq!((come[0].read(), come[1].read()), (2, 3));
        ends.join().unwrap();
        world.end(come);
    });
}

/// Another CPU frees a cell by a section, or by atomic operations if a walk has marked the entry. The CPU
/// of the block uses the cell again.
fn reuse_of_a_freed_cell(marked: bool) {
    both_modes(move || {
        let (world, [goes, stays]) = World::with();
        if marked {
            drop(goes.share());
        }
        let removes = spawn(ONE, move || {
            assert_eq!(goes.read(), 0);
            drop(goes);
        });
        let comes = world.add(2);
        assert_eq!((comes.read(), stays.read()), (2, 1));
        removes.join().unwrap();
        assert_eq!(world.list.stats().cpu_hits, 0);
        world.end([comes, stays]);
    });
}

#[test]
fn inv03_a_cell_that_another_cpu_freed_is_reused() {
    reuse_of_a_freed_cell(false);
}

#[test]
fn inv03_a_marked_cell_that_another_cpu_freed_is_reused() {
    reuse_of_a_freed_cell(true);
}

/// One thread has sections, the other has none.
#[test]
fn inv03_a_thread_without_an_id_shares_the_list() {
    model(|| {
        let (world, [goes]) = World::with();
        let there = beside(&world, ONE, |world| {
            take_id();
            let comes = world.add(1);
            drop(goes);
            comes
        });
        let here = world.add(2);
        let there = there.join().unwrap();
        world.end([here, there]);
    });
}

/// A marked entry is removed, and a walk marks the next entry in its cell.
#[test]
fn inv07_a_mark_is_that_of_the_entry_in_the_cell() {
    model(|| {
        let (world, [goes, stays]) = World::with();
        drop(goes.share());
        let next = beside(&world, ZERO, |world| {
            let comes = world.add(2);
            let found: Vec<_> = world.list.iter().collect();
            drop(comes);
            assert!(found.iter().all(|value| value.read() < 3));
        });
        set_current(ONE);
        drop(goes);
        next.join().unwrap();
        world.end([stays]);
    });
}

/// A removal by a reference does not remove the next entry in that cell.
#[test]
fn inv04_a_reference_removes_no_later_entry() {
    model(|| {
        let (world, [entry]) = World::with();
        let found = entry.share();
        let removes = beside(&world, ONE, move |world| _ = world.list.remove(&found).unwrap());
        drop(entry);
        let again = world.add(1);
        removes.join().unwrap();
        assert!(again.is_linked());
        world.end([again]);
    });
}

/// During the walk a cell is filled again and the slot grows. The walk ends, and sees the entry that
/// stays once.
#[test]
fn inv07_an_entry_that_stays_is_seen_once_beside_changes() {
    model(|| {
        let (world, [goes, stays]) = World::with();
        let there = beside(&world, ZERO, |world| {
            drop(goes);
            [2, 3].map(|value| world.add(value))
        });
        let mut seen = [0; 4];
        for found in world.list.iter() {
            seen[found.read() as usize] += 1;
        }
        assert!(seen[1] == 1 && seen.iter().all(|&times| times <= 1), "{seen:?}");
        let [second, third] = there.join().unwrap();
        world.end([stays, second, third]);
    });
}
