//! A table and many threads on the real kernel, with rseq sections and without.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` (3).
#![cfg(not(offlock_model))]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use offlock_percpu::rcu;
use radix_ctx::{Builder, CtxRef, CtxTable, Id};

use testkit::canary::{Canary, Census};
use testkit::child::rerun_without_rseq;
use testkit::rng::{self, Rng};
use testkit::wait_until;

/// Runs `f` on threads until the time is over. Each thread has a number and an rng.
fn storm(threads: usize, f: impl Fn(usize, &mut Rng) + Sync) {
    let until = Instant::now() + testkit::stress::stress_time(3);
    let stop = AtomicBool::new(false);
    let rounds = AtomicU64::new(0);
    thread::scope(|scope| {
        for me in 0..threads {
            let (f, stop, rounds) = (&f, &stop, &rounds);
            scope.spawn(move || {
                let mut rng = rng::seeded(me as u64);
                while !stop.load(Relaxed) {
                    for _ in 0..64 {
                        f(me, &mut rng);
                    }
                    rounds.fetch_add(64, Relaxed);
                    if !testkit::stress::keep_running(until, || rounds.load(Relaxed) > 1_000) {
                        stop.store(true, Relaxed);
                    }
                }
            });
        }
    });
    println!("{} rounds; {}", rounds.load(Relaxed), offlock_percpu::capabilities());
    assert!(rounds.into_inner() > 1_000);
}

/// A table whose contexts have ids on a board of places. The value of a context is its place.
struct World {
    table: CtxTable<Canary>,
    census: Census,
    board: Vec<AtomicU64>,
    /// References that one thread takes and another drops.
    held: Mutex<Vec<CtxRef<Canary>>>,
    inserted: AtomicU64,
    removed: AtomicU64,
}

impl World {
    fn new(places: usize, build: impl Fn(Builder<Canary>) -> Builder<Canary>) -> Self {
        Self {
            table: build(CtxTable::builder()).build(),
            census: Census::new(),
            board: (0..places).map(|_| AtomicU64::new(0)).collect(),
            held: Mutex::default(),
            inserted: AtomicU64::new(0),
            removed: AtomicU64::new(0),
        }
    }

    fn get(&self, place: usize) -> Option<Id> {
        Id::from_bits(self.board[place].load(Relaxed))
    }

    /// Removes a context, which another thread may do too: one of them succeeds. No reference is taken after it.
    fn remove(&self, id: Id) {
        self.removed.fetch_add(self.table.remove(id).is_ok().into(), Relaxed);
        assert!(self.table.get_ref(id).is_err());
    }

    /// Inserts a context, if the limits admit one, puts its id at a place, and removes that of the previous id.
    fn replace(&self, place: usize, by_ref: bool) {
        let context = Canary::new(place as u64, &self.census);
        let inserted = if by_ref {
            self.table.insert_ref(context).map(|held| CtxRef::id(&held))
        } else {
            self.table.insert(context)
        };
        let Ok(id) = inserted else { return };
        self.inserted.fetch_add(1, Relaxed);
        let old = Id::from_bits(self.board[place].swap(id.to_bits(), Relaxed));
        old.into_iter().for_each(|old| self.remove(old));
    }

    /// Finds contexts of some places under one guard, and reads them afterwards.
    fn look(&self, rng: &mut Rng) {
        let guard = rcu::pin();
        let places = (0..8).map(|_| rng.usize(..self.board.len()));
        let find = |place| Some((place, self.table.get(self.get(place)?, &guard).ok()?));
        let found: Vec<_> = places.filter_map(find).collect();
        assert!(found.iter().all(|(place, context)| context.read() == *place as u64));
    }

    /// Takes a reference, passes a clone to another thread, and drops one from another thread.
    fn refer(&self, place: usize, rng: &mut Rng) {
        let id = self.get(place);
        let Some(context) = id.and_then(|id| self.table.get_ref(id).ok()) else { return };
        assert_eq!(context.read(), place as u64);
        let mut held = self.held.lock().unwrap();
        held.push(context.clone());
        let other = (held.len() > 16).then(|| held.swap_remove(rng.usize(..16)));
        drop(held);
        other.inspect(|other| _ = other.read());
    }

    /// Checks a table that no other thread uses: `others` contexts are live that were not counted. Then closes
    /// the table and checks that no context is left.
    fn end(self, others: u64) {
        drop(self.held);
        self.table.flush().unwrap();
        self.table.validate();
        let live = self.inserted.into_inner() - self.removed.into_inner() + others;
        assert_eq!((self.table.len() as u64, self.table.stats().pending), (live, 0));
        assert_eq!(self.census.alive(), live as i64);
        println!("{}", self.table.stats());
        assert_eq!(self.table.remove_all(), Ok(live as usize));
        assert_eq!(self.census.alive(), 0);
        // Slots become vacant after the drops, and another thread of the process may still do that.
        wait_until(|| {
            rcu::poll();
            self.table.stats().slabs <= 1
        });
    }
}

/// Threads replace the contexts of some places, remove them, and use them by lookups and references.
fn churn(threads: usize, places: usize, build: impl Fn(Builder<Canary>) -> Builder<Canary>) {
    let world = World::new(places, build);
    storm(threads, |me, rng| {
        let place = rng.usize(..places);
        match rng.usize(..64) {
            0 => _ = world.table.flush().unwrap(),
            1..4 => world.get(place).into_iter().for_each(|id| world.remove(id)),
            4..16 => world.replace(place, rng.bool()),
            _ if me % 2 == 0 => world.replace(place, false),
            16..40 => world.refer(place, rng),
            _ => world.look(rng),
        }
    });
    world.end(0);
}

#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv12_churn() {
    churn(6, 1_000, |builder| builder);
}

/// In a table with few indexes each is used again soon.
#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv12_churn_at_the_limit() {
    churn(4, 70, |builder| builder.max_index(90).max_contexts(80));
}

#[test]
#[ignore = "stress: seconds of references"]
fn stress_inv13_references_against_removal() {
    churn(6, 40, |builder| builder);
}

/// Of many removals of one context one succeeds.
#[test]
#[ignore = "stress: seconds of removals"]
fn stress_inv14_one_of_many_removes() {
    let world = World::new(1, |builder| builder);
    storm(4, |me, rng| {
        if me == 0 && world.get(0).is_none_or(|id| !world.table.contains(id)) {
            world.replace(0, false);
        }
        if let Some(id) = world.get(0) {
            world.remove(id);
        }
        if rng.usize(..64) == 0 {
            world.table.flush().unwrap();
        }
    });
    world.end(0);
}

/// The table is dropped before its references.
#[test]
#[ignore = "stress: seconds of references"]
fn stress_inv13_references_outlive_their_tables() {
    let census = Census::new();
    storm(4, |_, rng| {
        let table = CtxTable::new();
        let ids = [0, 1, 2].map(|value| table.insert(Canary::new(value, &census)).unwrap());
        let refs = ids.map(|id| table.get_ref(id).unwrap());
        let clones = refs.clone();
        let other = thread::spawn(move || clones.iter().map(|context| context.read()).sum::<u64>());
        if rng.bool() {
            table.remove(ids[1]).unwrap();
        }
        drop(refs);
        drop(table);
        rcu::poll();
        assert_eq!(other.join().unwrap(), 3);
    });
    assert_eq!(census.alive(), 0);
}

#[test]
#[ignore = "stress: seconds of growth"]
fn stress_inv17_permanent_ids_are_found_throughout_growth() {
    let world = World::new(0, |builder| builder);
    let (table, census) = (&world.table, &world.census);
    let insert = |value| table.insert(Canary::new(value, census)).unwrap();
    let all: Vec<Id> = (0..=20_000).map(insert).collect();
    let permanent = [0, 1, 63, 64, 700, 4_095, 4_096, 20_000].map(|index| all[index]);
    table.retain(|id, _| permanent.contains(&id));
    storm(5, |me, rng| {
        if me < 2 {
            let ids: Vec<Id> = (0..rng.u64(1..30_000)).map(|_| insert(7)).collect();
            ids.into_iter().for_each(|id| _ = table.remove(id).unwrap());
            if rng.usize(..4) == 0 {
                table.flush().unwrap();
            }
            return;
        }
        for id in &permanent {
            assert_eq!(table.with(*id, Canary::read), Ok(id.index().into()));
        }
        let guard = rcu::pin();
        let mut seen = table.iter(&guard).map(|(id, _)| id);
        let all_seen = permanent.iter().all(|id| seen.any(|other| other == *id));
        assert!(all_seen, "an iteration returns the contexts that stay, in order");
    });
    world.end(permanent.len() as u64);
}

/// Runs all tests of this file in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_without_rseq() {
    rerun_without_rseq("stress_inv");
}
