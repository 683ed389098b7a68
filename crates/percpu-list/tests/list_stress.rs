//! The list, and threads that move between CPUs, on the real kernel, with and without rseq
//! sections.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` seconds (3).
#![cfg(not(offlock_model))]

#[path = "common/churn.rs"]
mod churn;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use percpu_list::{Entry, PerCpuList};

use churn::{storm, storm_on};
use testkit::canary::{Canary, Census};
use testkit::pin::{allowed_cpus, on};
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

type Shelf<'a> = Mutex<Option<Entry<Value>>>;

/// Removes an entry that any thread may have added, in one of several ways.
fn end(entry: Entry<Value>, rng: &mut Rng) {
    match rng.usize(..3) {
        0 => {
            entry.ended.store(true, Relaxed);
            drop(entry);
        }
        1 => {
            let value = entry.share();
            value.count(entry.remove().unwrap());
        }
        _ => {
            entry.ended.store(true, Relaxed);
            let value = entry.share();
            drop(entry);
            value.canary.read();
        }
    }
}

#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv03_churn_across_cpus() {
    let (census, added) = (Census::new(), AtomicU64::new(0));
    let list = PerCpuList::new();
    let shelves: Vec<Shelf<'_>> = (0..700).map(|_| Mutex::new(None)).collect();
    let enough = |calls| calls > 1_000 && added.load(Relaxed) > 1_000;
    let calls = storm(5, enough, |me, rng| {
        let place = rng.usize(..shelves.len());
        match rng.usize(..16) {
            0..8 => {
                let value = Value::new(place as u64, &census);
                added.fetch_add(1, Relaxed);
                let entry = list.insert(value).unwrap();
                let old = shelves[place].lock().unwrap().replace(entry);
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
                    found.canary.read();
                    found.count(rng.usize(..4) == 0 && list.remove(&found).unwrap());
                }
            }
        }
    });
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

/// Entries stay in the slot of a CPU on which no thread of the test runs.
#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv16_a_slot_without_threads() {
    let cpus = allowed_cpus();
    let (here, far) = (cpus[0], cpus[cpus.len() - 1]);
    let census = Census::new();
    let list = PerCpuList::<Canary>::new();
    let add = |value| list.insert(Canary::new(value, &census)).unwrap();
    let kept: Vec<_> = on(far, || (0..40).map(add).collect());
    let shelf: Vec<_> = on(far, || (0..4000).map(|_| add(1 << 32)).collect());
    let shelf = Mutex::new(shelf);
    assert!(kept.iter().all(|entry| entry.slot().index() == far));
    let enough = |calls| calls > 100;
    let calls = storm_on(&[here], 3, enough, |_, rng| {
        let mine: Vec<_> = (0..rng.usize(..50)).map(|_| add(1 << 32)).collect();
        let seen = list.iter().filter(|found| found.read() < 40).count();
        assert_eq!(seen, kept.len());
        assert!(list.lock_all().unwrap().len() >= kept.len() + mine.len());
        for entry in mine.into_iter().chain(shelf.lock().unwrap().pop()) {
            assert!(entry.remove().unwrap());
        }
    });
    drop(shelf);
    list.validate();
    assert_eq!((list.len(), census.alive()), (kept.len(), 40));
    let stats = list.stats();
    assert!(stats.cpu_hits < stats.removals || here == far, "{stats:?}");
    drop(kept);
    assert!(list.is_empty() && census.alive() == 0);
    assert!(calls > 100);
}

/// Runs all tests above in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_of_it_without_rseq() {
    testkit::child::rerun_without_rseq("stress_inv");
}
