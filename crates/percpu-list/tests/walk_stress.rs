//! Walks and snapshots while other threads add and remove, on the real kernel, with and without
//! rseq sections.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` seconds (3).
#![cfg(not(offlock_model))]

#[path = "common/churn.rs"]
mod churn;

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use percpu_list::PerCpuList;

use churn::storm;
use testkit::canary::{Canary, Census};
use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng::{self, Rng};

/// The pairs of which the first half was seen, and those of which the second half was seen.
#[derive(Default)]
struct Pairs {
    first: HashSet<u64>,
    second: HashSet<u64>,
}

impl Pairs {
    fn see(&mut self, value: u64) {
        let seen = if value.is_multiple_of(2) { &mut self.first } else { &mut self.second };
        assert!(seen.insert(value / 2), "{value} twice");
    }

    /// Returns how many first halves were seen alone. A second half is never seen alone.
    fn halves(self) -> u64 {
        let alone: Vec<_> = self.second.difference(&self.first).collect();
        assert!(alone.is_empty(), "without what was added before and removed after: {alone:?}");
        (self.first.len() - self.second.len()) as u64
    }
}

/// Each pair is added X, then Y, and removed Y, then X, so no instant has a Y without its X.
#[test]
#[ignore = "stress: seconds of snapshots"]
fn stress_inv06_snapshots_see_one_instant() {
    let (census, next) = (Census::new(), AtomicU64::new(0));
    let list = PerCpuList::new();
    let (snapshots, halves) = (AtomicU64::new(0), AtomicU64::new(0));
    let cpus = allowed_cpus();
    let enough = |_| snapshots.load(Relaxed) > 100 && halves.load(Relaxed) > 0;
    storm(4, enough, |me, rng| {
        if me == 0 {
            let mut pairs = Pairs::default();
            list.lock_all().unwrap().for_each(|value: &Canary| pairs.see(value.read()));
            snapshots.fetch_add(1, Relaxed);
            halves.fetch_add(pairs.halves(), Relaxed);
            return thread::yield_now();
        }
        let pair = next.fetch_add(2, Relaxed);
        let x = list.insert(Canary::new(pair, &census)).unwrap();
        if rng.usize(..8) == 0 {
            pin_to(&[cpus[rng.usize(..cpus.len())]]);
        }
        let y = list.insert(Canary::new(pair + 1, &census)).unwrap();
        if rng.usize(..2) == 0 {
            drop(y);
        } else {
            assert!(list.remove(&y.share()).unwrap());
        }
        drop(x);
    });
    println!("{snapshots:?} snapshots, {halves:?} half pairs");
    list.validate();
    assert_eq!((list.len(), list.stats().adds, census.alive()), (0, next.into_inner(), 0));
    assert!(snapshots.into_inner() > 100 && halves.into_inner() > 0);
}

/// Values that stay have numbers below this. Values that are added and removed have numbers above.
const STAY: u64 = 300;

/// Runs a walk, which must see the values that stay and its `own`. A slow walk lets other threads
/// run between steps, and may end early.
fn walk(values: impl Iterator<Item = u64>, own: &[u64], slow: bool, rng: &mut Rng) {
    let mut seen = HashSet::new();
    let end = if slow && rng.usize(..4) == 0 { rng.usize(..500) } else { usize::MAX };
    for (step, value) in values.enumerate() {
        if step == end {
            return;
        }
        assert!(seen.insert(value), "{value} was seen twice");
        if slow && rng.usize(..16) == 0 {
            thread::yield_now();
        }
    }
    let missed: Vec<u64> =
        (0..STAY).chain(own.iter().copied()).filter(|value| !seen.contains(value)).collect();
    assert!(missed.is_empty(), "not seen: {missed:?}");
}

/// The number of entries that a walk adds before it begins, and that stay until it ends. They are
/// at the end of their slots, from where a removal during the walk could move them.
const OWN: usize = 40;

/// Other entries are added and removed, so that the arrays grow to several segments and shrink.
fn walks_beside_changes(slow: bool) {
    let (census, next, walks) = (Census::new(), AtomicU64::new(STAY), AtomicU64::new(0));
    let list = PerCpuList::new();
    let (mut rng, cpus) = (rng::seeded(99), allowed_cpus());
    let mut stay = Vec::new();
    // Half of the entries are among entries that are removed before the walks begin.
    for value in 0..STAY {
        pin_to(&[cpus[value as usize % cpus.len()]]);
        let goes = list.insert(Canary::new(STAY, &census)).unwrap();
        stay.push(list.insert(Canary::new(value, &census)).unwrap());
        drop(goes);
    }
    let shelves: Vec<Mutex<Option<_>>> = (0..400).map(|_| Mutex::new(None)).collect();
    let enough = |_| walks.load(Relaxed) > 10 && next.load(Relaxed) > 1_000;
    storm(5, enough, |me, rng| {
        let new = || Canary::new(next.fetch_add(1, Relaxed), &census);
        if me < 2 {
            let own: Vec<_> = (0..OWN).map(|_| list.insert(new()).unwrap()).collect();
            let numbers: Vec<u64> = own.iter().map(|entry| entry.read()).collect();
            let found = list.iter();
            let mut held = None; // until the next step
            let values = found.map(|found| {
                let value = found.read();
                held = Some(found);
                value
            });
            walk(values, &numbers, slow, rng);
            if let Some(held) = held {
                held.read();
            }
            walks.fetch_add(1, Relaxed);
            return;
        }
        match rng.usize(..64) {
            0 => drop((0..rng.usize(..2_000)).map(|_| list.insert(new())).collect::<Vec<_>>()),
            1..32 => {
                let entry = list.insert(new()).unwrap();
                let old = shelves[rng.usize(..shelves.len())].lock().unwrap().replace(entry);
                drop(old);
            }
            _ => drop(shelves[rng.usize(..shelves.len())].lock().unwrap().take()),
        }
    });
    drop(shelves);
    list.validate();
    println!("{walks:?} walks; {next:?} values\n{}", list.stats());
    assert_eq!((list.len(), census.alive()), (STAY as usize, STAY as i64));
    walk(list.iter().map(|found| found.read()), &[], false, &mut rng);
    drop(stay);
    assert_eq!((list.len(), census.alive()), (0, 0));
    assert!(walks.into_inner() > 10 && next.into_inner() > 1_000);
}

#[test]
#[ignore = "stress: seconds of walks"]
fn stress_inv07_walks() {
    walks_beside_changes(false);
}

#[test]
#[ignore = "stress: seconds of walks"]
fn stress_inv11_slow_walks() {
    walks_beside_changes(true);
}

/// Runs all tests above in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_of_it_without_rseq() {
    testkit::child::rerun_without_rseq("stress_inv");
}
