//! The list on one thread: indexes in dense arrays, nested locks, lifetimes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use percpu_list::{CpuId, Entry, InsertError, LockError, PerCpuList, Refused, Stats};
use testkit::pin::{allowed_cpus, current_cpu, on, pin_to};

/// A value that counts its drop.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Keeps the thread of a test on the CPU where it runs.
fn stay() -> usize {
    let cpu = current_cpu();
    pin_to(&[cpu]);
    cpu
}

/// The array is [A, B, C, D] and a walk has read A and B. A removal of A must not move D to its
/// index.
#[test]
fn inv11_a_removal_behind_a_walk_moves_nothing_there() {
    stay();
    let list = PerCpuList::new();
    // The entries are more than a walk takes under one lock, so it must lock the slot again.
    let names: String = ('A'..='Z').chain('a'..='z').collect();
    for removed in [0, 5, 31] {
        let mut entries: Vec<_> =
            names.chars().map(|name| Some(list.insert(name).unwrap())).collect();
        let mut walk = list.iter();
        let mut seen: String = walk.by_ref().take(32).map(|found| *found.unwrap()).collect();
        entries[removed] = None;
        list.validate();
        seen.extend(walk.map(|found| *found.unwrap()));
        assert_eq!(seen, names, "each once, in the order of the additions");
    }
}

/// The walk's last entry and its next one are removed.
#[test]
fn inv12_the_current_and_the_next_are_removed_during_a_walk() {
    stay();
    let list = PerCpuList::new();
    for many in [3, 33, 65, 100] {
        let mut entries: Vec<Option<Entry<_>>> =
            (0..many).map(|n| Some(list.insert(Box::new(n)).unwrap())).collect();
        let mut seen = Vec::new();
        for found in list.iter() {
            let found = found.unwrap();
            entries[**found] = None;
            if let Some(next) = entries.get_mut(**found + 1) {
                *next = None;
            }
            list.validate();
            seen.push(**found); // the reference keeps it alive
        }
        // A walk takes a chunk of entries under one lock, so a removed entry of the chunk is still
        // returned.
        assert!(seen.windows(2).all(|two| two[0] < two[1]) && seen.len() >= many.div_ceil(2));
        assert!(list.is_empty());
    }
}

#[test]
fn inv10_a_list_with_a_permanent_entry_is_never_empty() {
    let list = PerCpuList::new();
    let _permanent = list.insert(0).unwrap();
    thread::scope(|scope| {
        let churn = || (0..20_000).for_each(|n| drop(list.insert(n).unwrap()));
        let others = [scope.spawn(churn), scope.spawn(churn)];
        while !others.iter().all(|other| other.is_finished()) {
            assert!(!list.is_empty() && !list.is_empty());
            let stats = list.stats();
            assert!(stats.cpu_hits <= stats.node_hits && stats.node_hits <= stats.removals);
            assert!(stats.removals < stats.adds);
        }
    });
    assert_eq!(list.len(), 1);
}

#[test]
fn inv15_hits_are_counted_by_the_slot_that_an_entry_was_added_to() {
    let list = PerCpuList::new();
    let cpus = allowed_cpus();
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    let node = |cpu: usize| offlock_percpu::topology().node_of(CpuId::new(cpu as u32));
    assert_eq!(list.stats(), Stats::default());
    assert_eq!(list.stats().cpu_hit_percent(), 100.0);
    for n in 0..10 {
        let entry = on(first, || list.insert(n).unwrap());
        assert_eq!(entry.slot().index(), first);
        assert!(on(if n < 7 { first } else { last }, || entry.remove().unwrap()));
    }
    let stats = list.stats();
    assert_eq!((stats.adds, stats.removals, stats.live()), (10, 10, 0));
    assert_eq!(stats.cpu_hits, if last == first { 10 } else { 7 });
    assert_eq!(stats.node_hits, if node(last) == node(first) { 10 } else { 7 });
}

/// Every combination of two removals of one entry.
#[test]
fn inv04_a_second_removal_returns_false() {
    let list = PerCpuList::new();
    let entry = list.insert(1).unwrap();
    let found = entry.share();
    assert_eq!([list.remove(&found), list.remove(&found)], [Ok(true), Ok(false)]);
    assert!(!entry.remove().unwrap());
    let entry = list.insert(2).unwrap();
    let found = entry.into_ref().unwrap();
    assert_eq!(list.remove(&found), Ok(false));
    list.validate();
}

/// A thread with a snapshot gets an error where it would wait for itself.
#[test]
fn inv09_a_lock_inside_a_snapshot_is_an_error_and_never_hangs() {
    let (list, other) = (PerCpuList::new(), PerCpuList::new());
    let entry = list.insert(1).unwrap();
    let found = entry.share();
    let snapshot = list.lock_all().unwrap();
    let InsertError { value, reason } = list.insert(2).unwrap_err();
    assert_eq!((value, reason), (2, Refused::Lock(LockError::Deadlock)));
    assert_eq!(list.lock_all().map(drop), Err(LockError::Deadlock));
    assert_eq!(list.iter().next().unwrap().map(drop), Err(LockError::Deadlock));
    assert_eq!(list.drain().next().unwrap().map(drop), Err(LockError::Deadlock));
    assert_eq!(list.remove(&found), Err(LockError::Deadlock));
    let error = entry.remove().unwrap_err();
    assert_eq!(error.reason, LockError::Deadlock);
    let error = error.entry.into_ref().unwrap_err();
    drop(error.entry);
    drop(other.insert(3).unwrap()); // another list has other locks
    assert_eq!(snapshot.iter().copied().collect::<Vec<_>>(), [1]);
    drop(snapshot);
    assert_eq!((list.len(), found.is_linked()), (0, false), "removed when the snapshot ended");
    assert_eq!(list.lock_all().unwrap().len(), 0);
    list.validate();
}

/// A walk that cannot lock returns its entries, then one error, and then ends, so a caller that
/// skips errors does not loop for ever. So does a drain.
#[test]
fn inv11_a_walk_ends_after_a_lock_error() {
    stay();
    let list = PerCpuList::new();
    let _entries: Vec<_> = (0..100).map(|n| list.insert(n).unwrap()).collect();
    let mut walk = list.iter();
    let seen: Vec<i32> = walk.by_ref().take(32).map(|found| *found.unwrap()).collect();
    assert_eq!(seen, (0..32).collect::<Vec<_>>());
    let snapshot = list.lock_all().unwrap();
    assert_eq!(walk.next().unwrap().map(drop), Err(LockError::Deadlock));
    assert!(walk.next().is_none());
    assert_eq!((list.iter().count(), list.drain().count(), snapshot.len()), (1, 1, 100));
    drop(snapshot);
    assert!(walk.next().is_none());
    assert_eq!((list.iter().count(), list.drain().count()), (100, 100));
    list.validate();
}

/// The entries that a thread drops while it has a snapshot are removed at its end, on every CPU, and
/// the snapshot does not change.
#[test]
fn inv06_entries_dropped_in_a_snapshot_are_removed_at_its_end() {
    let list = PerCpuList::new();
    let drops = Arc::new(AtomicUsize::new(0));
    let add = || list.insert(Counted(Arc::clone(&drops))).unwrap();
    let mut entries: Vec<_> = allowed_cpus().into_iter().map(|cpu| on(cpu, add)).collect();
    entries.extend([(); 3].map(|()| add()));
    let many = entries.len();
    let snapshot = list.lock_all().unwrap();
    drop(entries);
    assert_eq!((snapshot.len(), snapshot.iter().count(), drops.load(Relaxed)), (many, many, 0));
    drop(snapshot);
    list.validate();
    assert_eq!((list.len(), drops.load(Relaxed)), (0, many));
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
    stay();
    let list = Arc::new(PerCpuList::new());
    let add = || list.insert(Phoenix(Some(Arc::clone(&list)), 3)).unwrap();
    drop(add());
    drop(add().remove());
    drop(add().into_ref());
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

#[test]
fn inv13_a_reference_outlives_its_list() {
    let list = PerCpuList::new();
    std::mem::forget(list.insert(Box::new(1)).unwrap());
    let found = list.iter().next().unwrap().unwrap();
    drop(list);
    assert!(**found == 1 && !found.is_linked());

    let list = Arc::new(PerCpuList::new());
    let entry = list.insert_arc(Box::new(2)).unwrap();
    drop(list);
    assert!(entry.is_linked()); // the entry keeps the list alive
    let found = entry.into_ref().unwrap();
    assert_eq!(**found, 2);
}

/// A snapshot is forgotten, and so are entries. The list drops them all once.
#[test]
fn inv13_a_list_is_dropped_after_a_forgotten_snapshot() {
    let drops = Arc::new(AtomicUsize::new(0));
    let list = PerCpuList::new();
    let [dropped, forgotten] = [(); 2].map(|()| list.insert(Counted(Arc::clone(&drops))).unwrap());
    std::mem::forget(list.lock_all().unwrap());
    drop(dropped);
    std::mem::forget(forgotten);
    drop(list);
    assert_eq!(drops.load(Relaxed), 2);
}

/// The slot of a CPU on which no thread runs works like any other.
#[test]
fn inv16_entries_on_a_slot_without_threads() {
    let list = PerCpuList::new();
    let cpus = allowed_cpus();
    let (here, there) = (cpus[0], cpus[cpus.len() - 1]);
    let entry = on(there, || list.insert(7).unwrap());
    pin_to(&[here]);
    assert_eq!(list.iter().map(|found| *found.unwrap()).collect::<Vec<_>>(), [7]);
    assert_eq!(list.lock_all().unwrap().iter().copied().collect::<Vec<_>>(), [7]);
    assert_eq!((entry.slot().index(), entry.remove().unwrap(), list.len()), (there, true, 0));
}
