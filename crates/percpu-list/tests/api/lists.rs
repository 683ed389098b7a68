//! Cases that the steps of `list_ops` do not have: drops that use the list, and values of every size.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use percpu_list::{Deadlock, PerCpuList};
use testkit::pin::{current_cpu, pin_to};

/// A value that counts its drop.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Entries are removed before the place of a walk and after it, and their blocks are freed. Every
/// entry that stays is seen once. The steps of `list_ops` have too few entries for that: a walk
/// pins 16 blocks at a time, the first time 968 entries. Once it has returned them, the block on
/// which it stands may be freed.
#[test]
fn inv11_a_walk_goes_on_after_removals_and_a_trim() {
    pin_to(&[current_cpu()]);
    for paused in [1, 8, 968, 2_000] {
        let list = PerCpuList::new();
        let mut entries: Vec<_> = (0..5_000).map(|n| Some(list.insert(n).unwrap())).collect();
        let mut walk = list.iter();
        let mut seen: HashSet<usize> = walk.by_ref().take(paused).map(|found| *found).collect();
        assert_eq!(seen.len(), paused);
        // Whole blocks, of which the walk has seen some, and every third entry of the others.
        for (n, entry) in entries.iter_mut().enumerate() {
            if n % 1_000 >= 500 || n % 3 == 0 {
                *entry = None;
            }
        }
        list.validate();
        list.trim().unwrap();
        for found in walk {
            assert!(seen.insert(*found), "{} twice", *found);
        }
        let stayed: Vec<usize> = entries.iter().flatten().map(|entry| **entry).collect();
        assert!(stayed.iter().all(|n| seen.contains(n)));
        assert_eq!(list.iter().map(|found| *found).collect::<HashSet<_>>().len(), stayed.len());
        list.validate();
    }
}

/// Entries that are added during a walk do not keep it from ending.
#[test]
fn inv11_a_walk_ends_although_it_adds() {
    let list = PerCpuList::new();
    let mut added: Vec<_> = (0..100).map(|n| list.insert(n).unwrap()).collect();
    let mut steps = 0;
    for found in &list {
        added.extend((0..3).map(|_| list.insert(*found).unwrap()));
        steps += 1;
        assert!(steps < 10_000, "the walk does not end");
    }
    assert!(steps >= 100);
}

/// A drain that may not remove returns one error, and then ends, so a caller that skips errors does
/// not loop for ever. A walk goes on.
#[test]
fn inv09_a_drain_ends_after_a_lock_error() {
    let list = PerCpuList::new();
    let _entries: Vec<_> = (0..100).map(|n| list.insert(n).unwrap()).collect();
    let mut drain = list.drain();
    assert_eq!(drain.by_ref().take(30).filter(Result::is_ok).count(), 30);
    let snapshot = list.lock_all().unwrap();
    assert_eq!(drain.next().unwrap().map(drop), Err(Deadlock));
    assert!(drain.next().is_none());
    assert_eq!((list.iter().count(), list.drain().count(), snapshot.len()), (70, 1, 70));
    drop(snapshot);
    assert!(drain.next().is_none());
    assert_eq!((list.iter().count(), list.drain().count()), (70, 70));
    list.validate();
}

/// A value whose drop uses its own list, in the slot that it was removed from.
struct Phoenix(Option<Arc<PerCpuList<Phoenix>>>, u32);

impl Drop for Phoenix {
    fn drop(&mut self) {
        if let Some(list) = self.0.take().filter(|_| self.1 != 0) {
            let ash = Phoenix(Some(Arc::clone(&list)), self.1 - 1);
            let ash = list.insert(ash).expect("no lock is held where a value is dropped");
            drop(list.lock_all().expect("nor any other"));
            drop(ash);
        }
    }
}

#[test]
fn inv09_a_value_is_dropped_after_the_unlock() {
    pin_to(&[current_cpu()]);
    let list = Arc::new(PerCpuList::new());
    let add = || list.insert(Phoenix(Some(Arc::clone(&list)), 3)).unwrap();
    drop(add());
    assert_eq!(add().remove(), Ok(true));
    let one = add();
    let found = one.share();
    assert_eq!(list.remove(&found), Ok(true));
    drop((found, one));
    let entry = add();
    let snapshot = list.lock_all().unwrap();
    drop(entry);
    drop(snapshot);
    let entries = [add(), add()];
    assert_eq!(list.drain().count(), 2);
    drop(entries);
    assert_eq!(list.len(), 0);
    list.validate();
}

/// Adds, walks and removes values of a type, with drops that are counted.
fn values<T: Send + Sync>(new: impl Fn(u8) -> T, read: impl Fn(&T) -> u8) {
    let list = PerCpuList::new();
    let mut entries: Vec<_> = (0..200).map(|n| list.insert(new(n)).unwrap()).collect();
    let kept: Vec<_> = (200..=255).map(|n| list.insert(new(n)).unwrap()).collect();
    let mut seen = vec![0; 256];
    list.iter().for_each(|found| seen[usize::from(read(&found))] += 1);
    list.lock_all().unwrap().for_each(|value| seen[usize::from(read(value))] += 1);
    assert!(seen.iter().all(|times| *times == 2));
    assert!(entries.iter().enumerate().all(|(n, entry)| read(entry) == n as u8));
    let found = entries.pop().unwrap().share();
    entries.drain(..100).for_each(|entry| assert!(entry.remove().unwrap()));
    let again = list.insert(new(7)).unwrap();
    assert_eq!((read(&again), read(&found), list.len()), (7, 199, 156));
    drop((again, entries));
    list.validate();
    drop(list);
    assert!(kept.iter().enumerate().all(|(n, entry)| read(entry) == 200 + n as u8));
}

/// A value of 1 MiB stands in a box of its own, and is dropped there.
#[test]
fn inv01_a_large_value_is_removed_on_a_small_stack() {
    let list = PerCpuList::new();
    let thread = |stack| thread::Builder::new().stack_size(stack);
    thread::scope(|scope| {
        let list = &list;
        let add = || list.insert([7_u8; 1 << 20]).unwrap();
        let adds = thread(64 << 20).spawn_scoped(scope, move || [add(), add(), add()]).unwrap();
        let [by_section, walked, drained] = adds.join().unwrap();
        let ends = move || {
            drop(by_section);
            assert_eq!(list.iter().count(), 2);
            drop(walked);
            assert_eq!(list.drain().count(), 1);
            drop(drained);
        };
        thread(256 << 10).spawn_scoped(scope, ends).unwrap().join().unwrap();
    });
}

#[repr(align(4096))]
struct Aligned(u8);

#[test]
fn inv01_values_of_every_size_and_alignment() {
    let drops = Arc::new(AtomicUsize::new(0));
    values(|n| n, |n| *n);
    values(|n| [n; 3], |n| n[2]);
    values(|n| [u64::from(n); 3], |n| n[2] as u8);
    values(|n| [n; 256], |n| n[255]);
    values(|n| [n; 257], |n| n[256]);
    values(|n| [n; 5_000], |n| n[4_999]);
    values(Aligned, |n| {
        assert_eq!(std::ptr::from_ref(n).addr() % 4096, 0);
        n.0
    });
    values(|n| (Counted(Arc::clone(&drops)), n), |n| n.1);
    values(|n| (Counted(Arc::clone(&drops)), [n; 300]), |n| n.1[299]);
    assert_eq!((drops.load(Relaxed), Arc::strong_count(&drops)), (2 * 257, 1));

    let list = PerCpuList::new(); // of nothing
    let units: Vec<_> = (0..100).map(|_| list.insert(()).unwrap()).collect();
    assert_eq!((list.iter().count(), list.lock_all().unwrap().iter().count()), (100, 100));
    drop(units);
    assert!(list.is_empty());
}

/// The drop of a value that a snapshot has deferred may make the next snapshot, and keep it. What that one
/// defers in turn is removed at its end.
#[test]
fn inv01_a_snapshot_that_a_deferred_drop_keeps_loses_no_entry() {
    use std::cell::{Cell, RefCell};
    use std::sync::OnceLock;

    thread_local! {
        static HELD: RefCell<Option<percpu_list::Snapshot<'static, Keeper>>> = const { RefCell::new(None) };
        static DROPS: Cell<u32> = const { Cell::new(0) };
    }
    static LIST: OnceLock<PerCpuList<Keeper>> = OnceLock::new();
    struct Keeper;
    impl Drop for Keeper {
        fn drop(&mut self) {
            DROPS.set(DROPS.get() + 1);
            if HELD.with_borrow(Option::is_none) {
                HELD.set(LIST.get().and_then(|list| list.lock_all().ok()));
            }
        }
    }

    let list = LIST.get_or_init(PerCpuList::new);
    let entries = [(); 4].map(|()| list.insert(Keeper).unwrap());
    let snapshot = list.lock_all().unwrap();
    drop(entries);
    drop(snapshot);
    while let Some(kept) = HELD.take() {
        drop(kept);
    }
    assert_eq!((list.len(), DROPS.get()), (0, 4));
}
