//! The list, and threads that move between CPUs, on the real kernel, with and without rseq
//! sections.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` seconds (3).
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/churn.rs"]
mod churn;

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use percpu_list::{CpuId, Domain, Entry, PerCpuList, SlotPolicy};

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

fn churn_in(policy: SlotPolicy) {
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
fn stress_inv03_churn_across_cpus() {
    churn_in(SlotPolicy::PerCpu);
}

#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv01_churn_in_one_slot() {
    churn_in(SlotPolicy::Fixed(1));
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
    let list = PerCpuList::<Canary>::new();
    let kept: Vec<_> =
        (0..40).map(|n| list.insert_on(far, Canary::new(n, &census)).unwrap()).collect();
    let enough = |calls| calls > 100;
    let calls = storm_on(&[here], 3, enough, |_, rng| {
        let mine: Vec<_> = (0..rng.usize(..50))
            .map(|_| list.insert_on(far, Canary::new(1 << 32, &census)).unwrap())
            .collect();
        assert!(mine.iter().all(|entry| entry.slot() == far));
        let seen = list.iter().filter(|found| found.as_ref().unwrap().read() < 40).count();
        assert_eq!(seen, kept.len());
        assert!(list.lock_all().unwrap().len() >= kept.len() + mine.len());
        for entry in mine {
            assert!(entry.remove().unwrap());
        }
    });
    list.validate();
    assert_eq!((list.len(), census.alive()), (kept.len(), 40));
    let stats = list.stats();
    assert!(stats.cpu_hits == 0 && stats.removals > 0, "{stats:?}");
    drop(kept);
    assert!(list.is_empty() && census.alive() == 0);
    assert!(calls > 100);
    pin_to(&allowed_cpus());
}

/// A vector and a list get the same changes under the lock of the vector, while another thread
/// walks the list.
#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv18_one_slot_beside_a_locked_vector() {
    let census = Census::new();
    let list = PerCpuList::<Canary>::new_in(&Domain::with_policy(SlotPolicy::Fixed(1)));
    /// The expected content of the list.
    #[derive(Default)]
    struct Model<'a> {
        values: Vec<(u64, Entry<&'a PerCpuList<Canary>>)>,
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
        match rng.usize(..6) {
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
            _ if rng.usize(..8) == 0 => {
                let values = list.lock_all().unwrap();
                let found = sorted(&mut values.iter().map(Canary::read));
                drop(values);
                assert_eq!(found, sorted(&mut model.values.iter().map(|(value, _)| *value)));
                compared.fetch_add(1, Relaxed);
            }
            _ => {
                assert_eq!(list.len(), model.values.len());
                assert_eq!(list.is_empty(), model.values.is_empty());
            }
        }
        if model.values.len() > 300 {
            let half = model.values.len() / 2;
            model.values.drain(..half).for_each(drop);
        }
    });
    list.validate();
    drop(model);
    assert_eq!((list.len(), census.alive()), (0, 0));
    let stats = list.stats();
    let hits = (stats.cpu_hits, stats.live());
    assert_eq!(hits, (stats.removals, 0), "with one slot every removal is a hit");
    assert!(compared.into_inner() > 10);
}

/// Runs all tests above in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_of_it_without_rseq() {
    testkit::child::rerun_without_rseq("stress_inv");
}
