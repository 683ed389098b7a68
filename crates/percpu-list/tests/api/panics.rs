//! A panic in the caller's code leaves every lock usable, and loses no value.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use percpu_list::{CpuId, PerCpuList};

static CPU: CpuId = CpuId::new(0);

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
    list.flush().unwrap();
    assert_eq!((list.lock_all().unwrap().len(), list.len()), (linked, linked));
    let before = dropped.load(Relaxed);
    for cpu in 0..percpu::sync::cpu::possible() as u32 {
        drop(list.insert_on(CpuId::new(cpu), Bomb { dropped, armed: false }).unwrap());
    }
    assert_eq!(dropped.load(Relaxed) - before, percpu::sync::cpu::possible());
}

#[test]
fn inv17_a_panic_in_a_locked_walk_unlocks() {
    let dropped = &AtomicUsize::new(0);
    let list = PerCpuList::new();
    let _entries = [(); 3].map(|()| list.insert(Bomb { dropped, armed: false }).unwrap());
    assert!(panics(|| list.for_each(|_| resume_unwind(Box::new(()))).unwrap()));
    usable(&list, dropped, 3);
    assert!(panics(|| {
        let _snapshot = list.lock_all().unwrap();
        resume_unwind(Box::new(()));
    }));
    usable(&list, dropped, 3);
    assert!(panics(|| {
        let _found = list.iter().next().unwrap().unwrap();
        resume_unwind(Box::new(()));
    }));
    usable(&list, dropped, 3);
}

#[test]
fn inv17_a_value_that_panics_in_its_drop_is_off_the_list() {
    let dropped = &AtomicUsize::new(0);
    let list = PerCpuList::new();
    let _other = list.insert(Bomb { dropped, armed: false }).unwrap();
    let bomb = || list.insert(Bomb { dropped, armed: true }).unwrap();
    for (way, f) in [
        &(|| drop(bomb())) as &dyn Fn(),
        &|| drop(bomb().remove()),
        &|| drop(bomb().into_ref()),
        &|| {
            let entry = bomb();
            entry.defer_remove();
            list.flush().unwrap();
        },
        &|| {
            bomb().defer_remove();
            drop(list.lock_all().unwrap());
        },
        &|| {
            bomb().defer_remove();
            for found in list.iter() {
                drop(found.unwrap());
            }
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
fn inv17_the_remaining_values_are_dropped() {
    let dropped = &AtomicUsize::new(0);
    let value = |armed| Bomb { dropped, armed };
    let list = PerCpuList::new();
    let defer_at_once = || {
        let entries = [0, 1, 2, 3, 4].map(|n| list.insert_on(CPU, value(n == 2)).unwrap());
        entries.into_iter().for_each(|entry| entry.defer_remove());
    };
    let began = dropped.load(Relaxed);

    // The entry or the value of the call that flushes them is not lost.
    let entry = list.insert_on(CPU, value(false)).unwrap();
    defer_at_once();
    assert!(panics(|| drop(entry)));
    assert_eq!(dropped.load(Relaxed) - began, 6, "by a drop");
    usable(&list, dropped, 0);

    let began = dropped.load(Relaxed);
    defer_at_once();
    assert!(panics(|| drop(list.insert_on(CPU, value(false)).unwrap())));
    assert_eq!(dropped.load(Relaxed) - began, 6, "by an addition");
    usable(&list, dropped, 0);

    for (way, flush) in [
        &(|| list.flush().unwrap()) as &dyn Fn(),
        &|| drop(list.lock_all().unwrap()),
        &|| assert_eq!(list.iter().count(), 0),
        &|| assert_eq!(list.drain().count(), 0),
        &|| list.for_each(|_| ()).unwrap(),
    ]
    .into_iter()
    .enumerate()
    {
        let began = dropped.load(Relaxed);
        defer_at_once();
        assert!(panics(flush), "way {way}");
        assert_eq!(dropped.load(Relaxed) - began, 5, "way {way}");
        usable(&list, dropped, 0);
    }

    // The same for a drain that is dropped early, and for a list with forgotten entries.
    let began = dropped.load(Relaxed);
    let entries = [0, 1, 2].map(|n| list.insert_on(CPU, value(n == 1)).unwrap());
    let drained: Vec<_> = list.drain().map(Result::unwrap).collect();
    drop(drained);
    assert!(panics(|| drop(entries)));
    assert_eq!(dropped.load(Relaxed) - began, 3);
    usable(&list, dropped, 0);
    let began = dropped.load(Relaxed);
    for n in 0..5 {
        std::mem::forget(list.insert_on(CPU, value(n == 3)).unwrap());
    }
    assert!(panics(|| drop(list)));
    assert_eq!(dropped.load(Relaxed) - began, 5);
}

/// A value that is too large to be pooled.
struct Large<'a> {
    _bomb: Bomb<'a>,
    _rest: [u64; 32],
}

/// An entry is removed once, whatever panics on the way.
#[test]
fn inv17_a_removal_that_panics_ends_its_entry_once() {
    let dropped = &AtomicUsize::new(0);
    let large = PerCpuList::new();
    let value = |armed| Large { _bomb: Bomb { dropped, armed }, _rest: [0; 32] };
    let entry = large.insert(value(true)).unwrap();
    assert!(panics(|| _ = entry.remove()));
    assert_eq!((dropped.load(Relaxed), large.len()), (1, 0));
    large.validate();

    // The drop of another value, whose removal was deferred to this one, panics.
    let list = PerCpuList::new();
    for how in 0..3 {
        let before = dropped.load(Relaxed);
        let bad = list.insert_on(CPU, Bomb { dropped, armed: true }).unwrap();
        let good = list.insert_on(CPU, Bomb { dropped, armed: false }).unwrap();
        bad.defer_remove();
        assert!(panics(|| match how {
            0 => _ = good.remove(),
            1 => _ = good.try_remove(),
            _ => drop(good),
        }));
        assert_eq!(dropped.load(Relaxed) - before, 2, "way {how}");
        let [one, two] =
            [(); 2].map(|()| list.insert_on(CPU, Bomb { dropped, armed: false }).unwrap());
        assert!(!std::ptr::eq(&*one, &*two), "two entries share a node");
        drop((one, two));
        usable(&list, dropped, 0);
    }
}

/// An add flushes a value whose drop panics. The added value is not lost, and not on the list
/// without an entry.
#[test]
fn inv17_an_addition_that_panics_leaves_nothing() {
    let dropped = &AtomicUsize::new(0);
    let list = PerCpuList::new();
    for pooled in [false, true] {
        let before = dropped.load(Relaxed);
        let entries =
            [(); 2].map(|()| list.insert_on(CPU, Bomb { dropped, armed: false }).unwrap());
        let bad = list.insert_on(CPU, Bomb { dropped, armed: true }).unwrap();
        if pooled {
            drop(entries);
        } else {
            entries.into_iter().for_each(mem::forget);
        }
        bad.defer_remove();
        let linked = list.len() - 1;
        assert!(panics(|| mem::forget(list.insert_on(CPU, Bomb { dropped, armed: false }))));
        assert_eq!(
            (list.len(), dropped.load(Relaxed) - before),
            (linked, if pooled { 4 } else { 2 })
        );
        list.drain().for_each(drop);
    }
    list.insert_on(CPU, Bomb { dropped, armed: true }).unwrap().defer_remove();
    list.close().unwrap();
    usable_when_closed(&list);
}

fn usable_when_closed(list: &PerCpuList<Bomb<'_>>) {
    assert!(panics(|| list.flush().unwrap()));
    list.validate();
    assert!(list.is_empty() && list.is_closed());
}
