//! A panic in the caller's code leaves every lock usable, and loses no value.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use percpu_list::PerCpuList;
use testkit::pin::{allowed_cpus, on};

/// A value that counts its drop, and then panics if it is armed.
struct Bomb<'a> {
    dropped: &'a AtomicUsize,
    armed: bool,
}

impl Drop for Bomb<'_> {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Relaxed);
        if self.armed {
            resume_unwind(Box::new("the value's own"));
        }
    }
}

fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

/// Checks that no slot is locked, and that adds, walks and removals work.
fn usable<'a>(list: &PerCpuList<Bomb<'a>>, dropped: &'a AtomicUsize, linked: usize) {
    list.validate();
    assert_eq!((list.lock_all().unwrap().len(), list.len()), (linked, linked));
    let before = dropped.load(Relaxed);
    let cpus = allowed_cpus();
    for &cpu in &cpus {
        on(cpu, || drop(list.insert(Bomb { dropped, armed: false }).unwrap()));
    }
    assert_eq!(dropped.load(Relaxed) - before, cpus.len());
}

#[test]
fn inv05_a_panic_in_a_walk_or_a_snapshot_unlocks() {
    let dropped = &AtomicUsize::new(0);
    let list = PerCpuList::new();
    let _entries = [(); 3].map(|()| list.insert(Bomb { dropped, armed: false }).unwrap());
    assert!(panics(|| {
        list.lock_all().unwrap().for_each(|_| resume_unwind(Box::new(())));
    }));
    usable(&list, dropped, 3);
    assert!(panics(|| {
        let _found = list.iter().next().unwrap();
        resume_unwind(Box::new(()));
    }));
    usable(&list, dropped, 3);
}

#[test]
fn inv05_a_value_that_panics_in_its_drop_is_off_the_list() {
    let dropped = &AtomicUsize::new(0);
    let list = PerCpuList::new();
    let _other = list.insert(Bomb { dropped, armed: false }).unwrap();
    let bomb = || list.insert(Bomb { dropped, armed: true }).unwrap();
    for (way, f) in [
        &(|| drop(bomb())) as &dyn Fn(),
        &|| _ = bomb().remove(),
        &|| drop(bomb().share()),
        &|| {
            let entry = bomb();
            let snapshot = list.lock_all().unwrap();
            drop(entry);
            drop(snapshot);
        },
    ]
    .into_iter()
    .enumerate()
    {
        let before = dropped.load(Relaxed);
        assert!(panics(f), "way {way}");
        assert_eq!(dropped.load(Relaxed), before + 1, "way {way}");
        usable(&list, dropped, 1);
    }
}

/// The drop of one of several values panics. The remaining values are dropped.
#[test]
fn inv05_the_remaining_values_are_dropped() {
    let dropped = &AtomicUsize::new(0);
    let list = PerCpuList::new();
    let add = |armed| list.insert(Bomb { dropped, armed }).unwrap();

    let began = dropped.load(Relaxed);
    let entries = [0, 1, 2, 3, 4].map(|n| add(n == 2));
    let snapshot = list.lock_all().unwrap();
    let _ = entries.map(drop);
    assert!(panics(|| drop(snapshot)));
    assert_eq!(dropped.load(Relaxed) - began, 5, "at the end of a snapshot");
    usable(&list, dropped, 0);

    let began = dropped.load(Relaxed);
    let entries = [0, 1, 2].map(|n| add(n == 1));
    drop(list.drain().map(Result::unwrap).collect::<Vec<_>>());
    assert!(panics(|| drop(entries)));
    assert_eq!(dropped.load(Relaxed) - began, 3, "after a drain");
    usable(&list, dropped, 0);

    let began = dropped.load(Relaxed);
    let entries = [0, 1, 2].map(|n| add(n == 1));
    mem::forget(list.lock_all().unwrap());
    drop(entries);
    assert!(panics(|| drop(list)));
    assert_eq!(dropped.load(Relaxed) - began, 3, "with the list");
}

/// A value that is too large for a cell.
struct Large<'a> {
    _bomb: Bomb<'a>,
    _rest: [u64; 32],
}

/// An entry is removed once, although the drop of its value panics.
#[test]
fn inv05_a_removal_that_panics_ends_its_entry_once() {
    let dropped = &AtomicUsize::new(0);
    let large = PerCpuList::new();
    let value = |armed| Large { _bomb: Bomb { dropped, armed }, _rest: [0; 32] };
    let entry = large.insert(value(true)).unwrap();
    assert!(panics(|| _ = entry.remove()));
    assert_eq!((dropped.load(Relaxed), large.len()), (1, 0));
    large.validate();

    let list = PerCpuList::new();
    assert!(panics(|| _ = list.insert(Bomb { dropped, armed: true }).unwrap().remove()));
    assert_eq!(dropped.load(Relaxed), 2);
    let [one, two] = [(); 2].map(|()| list.insert(Bomb { dropped, armed: false }).unwrap());
    assert!(!std::ptr::eq(&*one, &*two), "two entries share a cell");
    drop((one, two));
    usable(&list, dropped, 0);
}
