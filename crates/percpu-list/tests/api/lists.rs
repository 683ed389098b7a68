//! The list on one thread: walks, nested locks, lifetimes, values of every size.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use percpu_list::{Deadlock, Entry, InsertError, PerCpuList, Refused, Stats};
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

/// Entries are removed before the place of a walk and after it, and their blocks are freed. Every
/// entry that stays is seen once.
#[test]
fn inv11_a_walk_goes_on_after_removals_and_a_trim() {
    stay();
    let list = PerCpuList::new();
    for paused in [1, 8, 1_024, 2_000] {
        let mut entries: Vec<_> = (0..5_000).map(|n| Some(list.insert(n).unwrap())).collect();
        let mut walk = list.iter();
        let mut seen: HashSet<usize> = walk.by_ref().take(paused).map(|found| *found).collect();
        assert_eq!(seen.len(), paused);
        // Whole blocks, of which the walk has seen some, and every third entry of the others.
        for (n, entry) in entries.iter_mut().enumerate() {
            if n % 1_000 < 500 || n % 3 == 0 {
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

/// The walk's last entry and its next one are removed.
#[test]
fn inv12_the_current_and_the_next_are_removed_during_a_walk() {
    stay();
    let list = PerCpuList::new();
    for many in [3, 33, 65, 100, 3_000] {
        let mut entries: Vec<Option<Entry<_>>> =
            (0..many).map(|n| Some(list.insert(Box::new(n)).unwrap())).collect();
        let mut seen = HashSet::new();
        for found in list.iter() {
            entries[**found] = None;
            if let Some(next) = entries.get_mut(**found + 1) {
                *next = None;
            }
            if seen.len() % 100 == 0 {
                list.validate();
            }
            assert!(seen.insert(**found)); // the reference keeps it alive
        }
        // A walk pins the entries of some blocks, so a removed entry of them is still returned.
        assert!(seen.len() >= many / 2 && list.is_empty());
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
    let node = |cpu: usize| {
        // The same table from its other side: the CPUs of each node, such as "0-3,8".
        let mut nodes =
            std::fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
        nodes.find_map(|node| {
            let list = std::fs::read_to_string(node.path().join("cpulist")).ok()?;
            let is_in = |part: &str| {
                let (first, last) = part.split_once('-').unwrap_or((part, part));
                Some((first.parse().ok()?..=last.parse::<usize>().ok()?).contains(&cpu))
            };
            list.trim().split(',').any(|part| is_in(part) == Some(true)).then(|| node.file_name())
        })
    };
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
    let found = entry.share();
    drop(entry);
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
    assert_eq!((value, reason), (2, Refused::Deadlock));
    assert_eq!(list.lock_all().map(drop), Err(Deadlock));
    assert_eq!(list.iter().map(|found| *found).collect::<Vec<_>>(), [1]); // it changes nothing
    assert_eq!((list.close(), list.is_closed()), (Err(Deadlock), false));
    assert_eq!(list.trim(), Err(Deadlock));
    assert_eq!(list.drain().next().unwrap().map(drop), Err(Deadlock));
    assert_eq!(list.remove(&found), Err(Deadlock));
    assert_eq!(entry.remove(), Err(Deadlock));
    drop(other.insert(3).unwrap()); // another list has other locks
    assert_eq!(snapshot.iter().copied().collect::<Vec<_>>(), [1]);
    drop(snapshot);
    assert_eq!((list.len(), found.is_linked()), (0, false), "removed when the snapshot ended");
    assert_eq!(list.lock_all().unwrap().len(), 0);
    list.validate();
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

#[test]
fn inv13_a_reference_outlives_its_list() {
    let list = Arc::new(PerCpuList::new());
    let entry = list.insert(Box::new(2)).unwrap();
    drop(list);
    assert!(entry.is_linked() && **entry == 2); // the entry keeps its block
    let found = entry.share();
    drop(entry);
    assert_eq!(**found, 2);
}

/// A snapshot is forgotten. The list drops an entry that was dropped meanwhile, and another one stays.
#[test]
fn inv13_a_list_is_dropped_after_a_forgotten_snapshot() {
    let drops = Arc::new(AtomicUsize::new(0));
    let list = PerCpuList::new();
    let [dropped, stays] = [(); 2].map(|()| list.insert(Counted(Arc::clone(&drops))).unwrap());
    std::mem::forget(list.lock_all().unwrap());
    drop(dropped);
    drop(list);
    assert!(drops.load(Relaxed) == 1 && stays.is_linked());
    drop(stays);
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
    assert_eq!(list.iter().map(|found| *found).collect::<Vec<_>>(), [7]);
    assert_eq!(list.lock_all().unwrap().iter().copied().collect::<Vec<_>>(), [7]);
    assert_eq!((entry.slot().index(), entry.remove().unwrap(), list.len()), (there, true, 0));
}

/// Entries and references outlive their list, on several threads, and end in any order.
#[test]
fn inv13_entries_and_references_outlive_their_list() {
    let drops = Arc::new(AtomicUsize::new(0));
    for round in 0..20 {
        let list = PerCpuList::new();
        let before = drops.load(Relaxed);
        let new = || Counted(Arc::clone(&drops));
        let mut kept: Vec<_> = (0..200).map(|_| list.insert(new()).unwrap()).collect();
        let mut found: Vec<_> = list.iter().step_by(3).collect();
        found.extend(kept.iter().step_by(7).map(Entry::share));
        let there = kept.split_off(100);
        thread::scope(|scope| {
            scope.spawn(|| drop(there));
            scope.spawn(|| drop(found));
            if round % 2 == 0 {
                thread::yield_now();
            }
            drop(list);
            assert!(kept.iter().all(Entry::is_linked));
            drop(kept);
        });
        assert_eq!(drops.load(Relaxed) - before, 200);
    }
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
