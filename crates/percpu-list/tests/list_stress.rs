//! Both lists, and threads that move between CPUs, on the real kernel, with and without rseq
//! sections.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` seconds (3).
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/churn.rs"]
mod churn;

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use percpu_list::{
    CpuId, Domain, Entry, IntrusiveList, Link, PerCpuList, Refused, SlotPolicy, linked,
};

use churn::{any_cpu, possible, storm, storm_on};
use testkit::canary::{Canary, Census};
use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng::Rng;

/// A value that exactly one call must remove before it is dropped.
struct Value {
    canary: Canary,
    /// How many removals returned true.
    removed: AtomicU32,
    /// Set if the owner removed the entry without a result.
    ended: AtomicBool,
}

impl Value {
    fn new(value: u64, census: &Census) -> Self {
        let (removed, ended) = (AtomicU32::new(0), AtomicBool::new(false));
        Self { canary: Canary::new(value, census), removed, ended }
    }

    /// Counts the result of a removal.
    fn count(&self, removed: bool) {
        self.removed.fetch_add(removed.into(), Relaxed);
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        let (removed, ended) = (*self.removed.get_mut(), *self.ended.get_mut());
        assert!(removed == 1 || removed == 0 && ended, "{removed} removals; ended: {ended}");
    }
}

type Shelf<'a> = Mutex<Option<Entry<&'a PerCpuList<Value>>>>;

/// Removes an entry that any thread may have added, in one of several ways.
fn end(entry: Entry<&PerCpuList<Value>>, rng: &mut Rng) {
    match rng.usize(..5) {
        0 => {
            entry.ended.store(true, Relaxed);
            drop(entry);
        }
        1 => {
            entry.ended.store(true, Relaxed);
            entry.defer_remove();
        }
        2 => {
            let value = entry.share();
            value.count(entry.remove_on(any_cpu(rng)).unwrap());
        }
        3 => {
            entry.ended.store(true, Relaxed);
            let value = entry.into_ref().unwrap();
            value.canary.read();
        }
        _ => {
            let value = entry.share();
            match entry.try_remove() {
                Ok(removed) => value.count(removed),
                Err(refused) => value.count(refused.entry.remove().unwrap()),
            }
        }
    }
}

fn owning_churn(policy: SlotPolicy) {
    let (census, added) = (Census::new(), AtomicU64::new(0));
    let list = PerCpuList::new_in(&Domain::with_policy(policy));
    let shelves: Vec<Shelf<'_>> = (0..700).map(|_| Mutex::new(None)).collect();
    let enough = |calls| calls > 1_000 && added.load(Relaxed) > 1_000;
    let calls = storm(5, enough, |me, rng| {
        let place = rng.usize(..shelves.len());
        match rng.usize(..16) {
            0..8 => {
                let value = Value::new(place as u64, &census);
                added.fetch_add(1, Relaxed);
                let entry = if rng.usize(..2) == 0 {
                    list.insert(value)
                } else {
                    list.insert_on(any_cpu(rng), value)
                };
                let old = shelves[place].lock().unwrap().replace(entry.unwrap());
                if let Some(old) = old {
                    assert_eq!(old.canary.read(), place as u64);
                    end(old, rng);
                }
            }
            8..14 => {
                let old = shelves[place].lock().unwrap().take();
                if let Some(old) = old {
                    assert_eq!(old.canary.read(), place as u64);
                    end(old, rng);
                }
            }
            14 => {
                // This thread is not the owner. The entry stays in its place, unlinked.
                let found = shelves[place].lock().unwrap().as_ref().map(Entry::share);
                if let Some(found) = found {
                    found.count(list.remove(&found).unwrap());
                }
            }
            _ if me == 0 && rng.usize(..64) == 0 => {
                // The drain runs to its end, because an entry that it has removed and not returned
                // would not be counted.
                list.drain().for_each(|found| found.unwrap().count(true));
            }
            _ => {
                for found in list.iter().take(3) {
                    let found = found.unwrap();
                    found.canary.read();
                    found.count(rng.usize(..4) == 0 && list.remove(&found).unwrap());
                }
            }
        }
    });
    list.flush().unwrap();
    list.validate();
    let linked = |shelf: &Shelf<'_>| shelf.lock().unwrap().as_ref().is_some_and(Entry::is_linked);
    let linked = shelves.iter().filter(|shelf| linked(shelf)).count();
    let (stats, added) = (list.stats(), added.into_inner());
    println!("{stats}");
    assert_eq!((stats.adds, stats.live()), (added, linked as u64));
    assert_eq!((list.len(), list.iter().count()), (linked, linked));
    for shelf in &shelves {
        let entry = shelf.lock().unwrap().take();
        if let Some(entry) = entry {
            let value = entry.share();
            value.count(entry.remove().unwrap());
        }
    }
    list.validate();
    assert_eq!((list.len(), list.stats().removals, census.alive()), (0, added, 0));
    assert!(calls > 1_000 && added > 1_000);
}

#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv01_owning_churn_across_cpus() {
    owning_churn(SlotPolicy::PerCpu);
}

#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv01_owning_churn_in_one_slot() {
    owning_churn(SlotPolicy::Fixed(1));
}

struct Item {
    canary: Canary,
    /// How often the item was added and removed, by the results of the calls.
    added: AtomicU64,
    removed: AtomicU64,
    link: Link,
}
linked!(Item => link);

impl Item {
    fn new(value: u64, census: &Census, domain: &Domain) -> Self {
        let (added, removed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { canary: Canary::new(value, census), added, removed, link: Link::new(domain) }
    }
}

/// Each thread adds and removes the items of all threads, on two lists of a domain. Other items are
/// dropped by another thread, linked or not.
#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv03_intrusive_churn_across_cpus() {
    let (census, domain) = (Census::new(), Domain::new());
    let lists = [IntrusiveList::new_in(&domain), IntrusiveList::new_in(&domain)];
    let items: Vec<Pin<Arc<Item>>> =
        (0..600).map(|n| Arc::pin(Item::new(n, &census, &domain))).collect();
    let shelves: Vec<Mutex<Option<Pin<Box<Item>>>>> = (0..50).map(|_| Mutex::new(None)).collect();
    let dropped_items = AtomicU64::new(0);
    let ins = || items.iter().map(|item| item.added.load(Relaxed)).sum::<u64>();
    let enough = |calls| calls > 1_000 && dropped_items.load(Relaxed) > 100 && ins() > 1_000;
    let calls = storm(5, enough, |_, rng| {
        let (place, list) = (rng.usize(..items.len()), &lists[rng.usize(..2)]);
        let item = &items[place];
        match rng.usize(..16) {
            0..6 => {
                let added = if rng.usize(..2) == 0 {
                    list.insert(item.as_ref())
                } else {
                    list.insert_on(any_cpu(rng), item.as_ref())
                };
                assert!(matches!(added, Ok(()) | Err(Refused::Linked)), "{added:?}");
                item.added.fetch_add(added.is_ok().into(), Relaxed);
            }
            6..12 => {
                let removed = match rng.usize(..4) {
                    0 => list.remove(item),
                    1 => list.remove_on(any_cpu(rng), item),
                    2 => item.link.remove(),
                    _ => Ok(item.link.try_remove() == Ok(true)),
                };
                item.removed.fetch_add(removed.unwrap().into(), Relaxed);
            }
            12..14 => {
                let new = Box::pin(Item::new(1 << 32, &census, &domain));
                list.insert(new.as_ref()).unwrap();
                dropped_items.fetch_add(1, Relaxed);
                let old = shelves[place % shelves.len()].lock().unwrap().replace(new);
                if let Some(old) = old {
                    assert!(old.link.is_linked());
                    if rng.usize(..2) == 0 {
                        assert_eq!(old.link.remove(), Ok(true));
                    }
                }
            }
            14 => list.for_each(|item| _ = item.canary.read()).unwrap(),
            _ if rng.usize(..16) == 0 => {
                let pooled = |item: &Item| item.canary.read() < 1 << 32;
                let taken = list.retain(|item| {
                    let taken = pooled(&item) && item.canary.read() % 7 == 0;
                    item.removed.fetch_add(taken.into(), Relaxed);
                    !taken
                });
                assert!(taken.unwrap() < items.len());
            }
            _ => list.lock_all().unwrap().for_each(|item| _ = item.canary.read()),
        }
    });
    for list in &lists {
        list.validate();
    }
    let stats = lists.each_ref().map(IntrusiveList::stats);
    println!("{}\n{}", stats[0], stats[1]);
    let (mut added, mut live) = (0, 0);
    for item in &items {
        let (ins, outs) = (item.added.load(Relaxed), item.removed.load(Relaxed));
        assert_eq!(ins - outs, item.link.is_linked().into(), "{ins} adds, {outs} removals");
        added += ins;
        live += ins - outs;
    }
    assert_eq!(stats[0].adds + stats[1].adds, added + dropped_items.load(Relaxed));
    drop(shelves);
    assert_eq!(lists[0].len() + lists[1].len(), live as usize);
    assert_eq!(census.alive(), items.len() as i64);
    let mut seen = HashSet::new();
    for list in &lists {
        list.for_each(|item| assert!(seen.insert(item.canary.read()))).unwrap();
    }
    assert_eq!(seen.len(), live as usize);
    drop(items);
    assert!(lists.iter().all(IntrusiveList::is_empty) && census.alive() == 0);
    assert!(calls > 1_000 && added > 1_000 && dropped_items.into_inner() > 100);
}

/// All threads run on one CPU, and add to the slot of another.
#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv16_a_slot_without_threads() {
    let here = allowed_cpus()[0];
    let Some(far) = (0..possible()).rev().find(|cpu| *cpu != here) else {
        println!("there is one CPU only");
        return;
    };
    let far = CpuId::new(far as u32);
    pin_to(&[here]);
    let census = Census::new();
    let domain = Domain::new();
    let list = PerCpuList::<Canary>::new_in(&domain);
    let items = IntrusiveList::new_in(&domain);
    let kept: Vec<_> =
        (0..40).map(|n| list.insert_on(far, Canary::new(n, &census)).unwrap()).collect();
    let pinned: Vec<_> = (0..40).map(|n| Box::pin(Item::new(n, &census, &domain))).collect();
    pinned.iter().for_each(|item| items.insert_on(far, item.as_ref()).unwrap());
    let enough = |calls| calls > 100;
    let calls = storm_on(&[here], 3, enough, |_, rng| {
        let mine: Vec<_> = (0..rng.usize(..50))
            .map(|_| list.insert_on(far, Canary::new(1 << 32, &census)).unwrap())
            .collect();
        let item = Box::pin(Item::new(1 << 32, &census, &domain));
        items.insert_on(far, item.as_ref()).unwrap();
        assert!(item.link.slot() == far && mine.iter().all(|entry| entry.slot() == far));
        let seen = list.iter().filter(|found| found.as_ref().unwrap().read() < 40).count();
        assert_eq!(seen, kept.len());
        let values = items.iter_pinned(|item| Some(item.canary.read()));
        let seen = values.filter(|found| *found.as_ref().unwrap() < 40).count();
        assert_eq!(seen, pinned.len());
        assert!(list.lock_all().unwrap().len() >= kept.len() + mine.len());
        for entry in mine {
            assert!(entry.remove().unwrap());
        }
        assert_eq!(items.remove(&item), Ok(true));
    });
    list.validate();
    items.validate();
    assert_eq!((list.len(), items.len(), census.alive()), (kept.len(), pinned.len(), 80));
    let stats = [list.stats(), items.stats()];
    assert!(stats.iter().all(|stats| stats.cpu_hits == 0 && stats.removals > 0), "{stats:?}");
    drop((kept, pinned));
    assert!(list.is_empty() && items.is_empty() && census.alive() == 0);
    assert!(calls > 100);
    pin_to(&allowed_cpus());
}

/// A vector and a list get the same changes under the lock of the vector, while another thread
/// walks the list.
#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv18_one_slot_beside_a_locked_vector() {
    let census = Census::new();
    let domain = Domain::with_policy(SlotPolicy::Fixed(1));
    let list = PerCpuList::<Canary>::new_in(&domain);
    let items = IntrusiveList::new_in(&domain);
    let pool: Vec<_> = (0..100).map(|n| Box::pin(Item::new(n, &census, &domain))).collect();
    /// The expected content of the lists.
    #[derive(Default)]
    struct Model<'a> {
        values: Vec<(u64, Entry<&'a PerCpuList<Canary>>)>,
        items: Vec<u64>,
        next: u64,
    }
    let model = Mutex::new(Model::default());
    let sorted = |values: &mut dyn Iterator<Item = u64>| {
        let mut values: Vec<u64> = values.collect();
        values.sort_unstable();
        values
    };
    let compared = AtomicU64::new(0);
    let enough = |_| compared.load(Relaxed) > 10;
    storm(4, enough, |me, rng| {
        if me == 3 {
            let mut seen = HashSet::new();
            assert!(list.iter().all(|found| seen.insert(found.unwrap().read())));
            return list.for_each(|value| assert!(value.read() < u64::MAX)).unwrap();
        }
        let mut model = model.lock().unwrap();
        let model = &mut *model;
        match rng.usize(..8) {
            0..3 => {
                let entry = list.insert_on(any_cpu(rng), Canary::new(model.next, &census)).unwrap();
                model.values.push((model.next, entry));
                model.next += 1;
            }
            3..5 if !model.values.is_empty() => {
                let (value, entry) = model.values.swap_remove(rng.usize(..model.values.len()));
                assert_eq!(entry.read(), value);
                assert!(entry.remove().unwrap());
            }
            5..7 => {
                let item = &pool[rng.usize(..pool.len())];
                let value = item.canary.read();
                match model.items.iter().position(|other| *other == value) {
                    Some(place) => {
                        assert_eq!(items.insert(item.as_ref()), Err(Refused::Linked));
                        assert_eq!(items.remove_on(any_cpu(rng), item), Ok(true));
                        model.items.swap_remove(place);
                    }
                    None => {
                        assert_eq!(items.remove(item), Ok(false));
                        items.insert_on(any_cpu(rng), item.as_ref()).unwrap();
                        model.items.push(value);
                    }
                }
            }
            _ if rng.usize(..8) == 0 => {
                let values = list.lock_all().unwrap();
                let found = sorted(&mut values.iter().map(Canary::read));
                drop(values);
                assert_eq!(found, sorted(&mut model.values.iter().map(|(value, _)| *value)));
                let walked = items.iter_pinned(|item| Some(item.canary.read()));
                let walked = sorted(&mut walked.map(Result::unwrap));
                assert_eq!(walked, sorted(&mut model.items.iter().copied()));
                compared.fetch_add(1, Relaxed);
            }
            _ => {
                assert_eq!((list.len(), items.len()), (model.values.len(), model.items.len()));
                assert_eq!(list.is_empty(), model.values.is_empty());
            }
        }
        if model.values.len() > 300 {
            let half = model.values.len() / 2;
            model.values.drain(..half).for_each(drop);
        }
    });
    list.validate();
    items.validate();
    drop(model);
    drop(pool);
    assert_eq!((list.len(), items.len(), census.alive()), (0, 0, 0));
    for stats in [list.stats(), items.stats()] {
        assert_eq!(
            (stats.cpu_hits, stats.live()),
            (stats.removals, 0),
            "with one slot every removal is a hit"
        );
    }
    assert!(compared.into_inner() > 10);
}

/// Runs all tests above in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_of_it_without_rseq() {
    testkit::child::rerun_without_rseq("stress_inv");
}
