//! A panic in the caller's code leaves every lock usable, and loses no value.

use std::cell::Cell;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use percpu_list::{Entry, PerCpuList};
use testkit::pin::{allowed_cpus, on};

thread_local! {
    static DROPPED: Cell<usize> = const { Cell::new(0) };
}

/// A value that counts its drop, and then panics if it is armed. With 32 words it is too large for a cell.
struct Bomb<const WORDS: usize> {
    armed: bool,
    _rest: [u64; WORDS],
}

impl<const WORDS: usize> Drop for Bomb<WORDS> {
    fn drop(&mut self) {
        DROPPED.set(DROPPED.get() + 1);
        if self.armed {
            resume_unwind(Box::new("the value's own"));
        }
    }
}

type List<const WORDS: usize> = PerCpuList<Bomb<WORDS>>;
type Three<const WORDS: usize> = [Entry<Bomb<WORDS>>; 3];

fn add<const WORDS: usize>(list: &List<WORDS>, armed: bool) -> Entry<Bomb<WORDS>> {
    list.insert(Bomb { armed, _rest: [0; WORDS] }).unwrap()
}

/// Adds three entries, of which the second is armed.
fn three<const WORDS: usize>(list: &List<WORDS>) -> Three<WORDS> {
    DROPPED.set(0);
    [false, true, false].map(|armed| add(list, armed))
}

fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

/// Checks that no slot is locked, that no two entries share a cell, and that adds, walks and removals work.
fn usable<const WORDS: usize>(list: &List<WORDS>, linked: usize) {
    list.validate();
    assert_eq!((list.lock_all().unwrap().len(), list.len()), (linked, linked));
    let before = DROPPED.get();
    for cpu in allowed_cpus() {
        on(cpu, || {
            let [one, two] = [(); 2].map(|()| add(list, false));
            assert!(!std::ptr::eq(&*one, &*two), "two entries share a cell");
        });
    }
    assert_eq!(DROPPED.get() - before, 2 * allowed_cpus().len());
}

#[test]
fn inv05_a_panic_in_a_walk_or_a_snapshot_unlocks() {
    let list = List::<1>::new();
    let _entries = [(); 3].map(|()| add(&list, false));
    assert!(panics(|| list.lock_all().unwrap().for_each(|_| resume_unwind(Box::new(())))));
    usable(&list, 3);
    assert!(panics(|| {
        let _found = list.iter().next().unwrap();
        resume_unwind(Box::new(()));
    }));
    usable(&list, 3);
}

/// Each way to end an entry drops the values after the one that panics, and each value once.
fn every_way_drops_all<const WORDS: usize>() {
    let ways: [fn(&List<WORDS>, Three<WORDS>); 5] = [
        |_, entries| drop(entries),
        |_, entries| _ = entries.map(Entry::remove),
        |_, entries| _ = entries.map(|entry| drop(entry.share())),
        |list, entries| {
            let snapshot = list.lock_all().unwrap();
            drop(entries);
            assert_eq!(DROPPED.get(), 0);
            drop(snapshot);
        },
        |list, entries| {
            drop(list.drain().map(Result::unwrap).collect::<Vec<_>>());
            drop(entries);
        },
    ];
    for (number, way) in ways.into_iter().enumerate() {
        let list = List::new();
        let entries = three(&list);
        assert!(panics(|| way(&list, entries)), "way {number}");
        assert_eq!(DROPPED.get(), 3, "way {number}");
        usable(&list, 0);
    }
}

#[test]
fn inv05_a_panic_in_a_drop_keeps_no_value() {
    every_way_drops_all::<1>();
    every_way_drops_all::<32>();
}

/// A snapshot is forgotten. The list drops the entries that were dropped meanwhile, and another one stays.
#[test]
fn inv05_the_list_drops_what_a_forgotten_snapshot_has_left() {
    let list = List::<1>::new();
    let (stays, entries) = (add(&list, false), three(&list));
    mem::forget(list.lock_all().unwrap());
    drop(entries);
    assert_eq!(DROPPED.get(), 0);
    assert!(panics(|| drop(list)));
    assert!(DROPPED.get() == 3 && stays.is_linked());
    drop(stays);
    assert_eq!(DROPPED.get(), 4);
}
