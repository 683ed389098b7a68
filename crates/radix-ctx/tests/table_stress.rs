//! A table and many threads on the real kernel, with rseq sections and without.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` (3).
#![cfg(not(offlock_model))]

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::rcu;
use radix_ctx::{CtxRef, CtxTable, Id};

use testkit::child::rerun_without_rseq;
use testkit::rng::{self, Rng};

static ALIVE: AtomicI64 = AtomicI64::new(0);

/// A context that detects reads after its drop and torn reads.
struct Canary([u64; 7]);

impl Canary {
    fn new(value: u64) -> Self {
        ALIVE.fetch_add(1, Relaxed);
        Self([value; 7])
    }

    fn read(&self) -> u64 {
        let value = self.0[0];
        assert!(value != u64::MAX, "read after its drop");
        assert!(self.0.iter().all(|word| *word == value), "torn: {:?}", self.0);
        value
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.read();
        for word in &mut self.0 {
            // SAFETY: a word of `self`. The write is volatile because no read follows that a compiler can see.
            unsafe { std::ptr::from_mut(word).write_volatile(u64::MAX) };
        }
        ALIVE.fetch_sub(1, Relaxed);
    }
}

/// Ids that the threads share. The value of a context is the place of its id.
struct Board(Vec<AtomicU64>);

impl Board {
    fn new(places: usize) -> Self {
        Self((0..places).map(|_| AtomicU64::new(0)).collect())
    }

    fn get(&self, place: usize) -> Option<Id> {
        Id::from_bits(self.0[place].load(Relaxed))
    }

    /// Inserts a context, puts its id at a place, and removes the context of the previous id.
    fn replace(&self, table: &CtxTable<Canary>, place: usize) {
        let Ok(id) = table.insert(Canary::new(place as u64)) else { return };
        let old = Id::from_bits(self.0[place].swap(id.to_bits(), Relaxed));
        if let Some(old) = old {
            table.remove(old).expect("only the thread that takes an id from the board removes it");
        }
    }
}

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

/// Checks a table that no other thread uses: the contexts of the board and `others` more are live. Then
/// closes the table and checks that no context is left.
fn end(table: CtxTable<Canary>, board: &Board, others: usize) {
    table.flush().unwrap();
    table.validate();
    let live = (0..board.0.len()).filter_map(|place| board.get(place)).count() + others;
    assert_eq!((table.len(), table.stats().pending), (live, 0));
    assert_eq!(ALIVE.load(Relaxed), live as i64);
    println!("{}", table.stats());
    assert_eq!(table.remove_all(), Ok(live));
    assert_eq!(ALIVE.load(Relaxed), 0);
    // Slots become vacant after the drops, and another thread of the process may still do that.
    let began = Instant::now();
    while table.stats().slabs > 1 {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "slabs are not freed: {}",
            table.stats()
        );
        rcu::poll();
        thread::yield_now();
    }
    drop(table);
}

#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv12_churn() {
    let (table, board) = (CtxTable::new(), Board::new(1_000));
    storm(6, |_, rng| {
        let place = rng.usize(..1_000);
        match rng.usize(..4) {
            0 => board.replace(&table, place),
            1 => {
                let guard = rcu::pin();
                let found = (0..8).filter_map(|next| {
                    let place = (place + next) % 1_000;
                    Some((place, table.get(board.get(place)?, &guard).ok()?))
                });
                let found: Vec<_> = found.collect();
                for (place, context) in found {
                    assert_eq!(context.read(), place as u64);
                }
            }
            _ => {
                if let Some(id) = board.get(place) {
                    let found = table.with(id, Canary::read);
                    assert!(found.is_err() || found == Ok(place as u64));
                }
            }
        }
    });
    end(table, &board, 0);
}

/// In a table with few indexes each is used again soon.
#[test]
#[ignore = "stress: seconds of churn"]
fn stress_inv12_churn_at_the_limit() {
    let table = CtxTable::builder().max_index(90).max_contexts(80).build();
    let board = Board::new(70);
    storm(4, |me, rng| {
        board.replace(&table, rng.usize(..70));
        if me == 0 && rng.usize(..16) == 0 {
            drop(
                table
                    .insert_ref(Canary::new(0))
                    .map(|held| table.remove(CtxRef::id(&held)).is_ok()),
            );
        }
        if rng.usize(..64) == 0 {
            table.flush().unwrap();
        }
    });
    end(table, &board, 0);
}

#[test]
#[ignore = "stress: seconds of references"]
fn stress_inv13_references_against_removal() {
    let (table, board) = (CtxTable::new(), Board::new(40));
    let held: Vec<std::sync::Mutex<Option<CtxRef<Canary>>>> =
        (0..16).map(|_| std::sync::Mutex::new(None)).collect();
    storm(6, |me, rng| {
        let place = rng.usize(..40);
        if me < 2 {
            return board.replace(&table, place);
        }
        let Some(context) = board.get(place).and_then(|id| table.get_ref(id).ok()) else { return };
        assert_eq!(context.read(), place as u64);
        let other = context.clone();
        drop(context);
        // Passes the reference to another thread, and drops one from another thread.
        let place = rng.usize(..16);
        let swapped = held[place].lock().unwrap().replace(other);
        if let Some(context) = swapped {
            context.read();
        }
    });
    for place in held {
        drop(place.into_inner().unwrap());
    }
    end(table, &board, 0);
}

/// The table is dropped before its references.
#[test]
#[ignore = "stress: seconds of references"]
fn stress_inv13_references_outlive_their_tables() {
    storm(4, |_, rng| {
        let table = CtxTable::new();
        let ids: Vec<Id> = (0..3).map(|v| table.insert(Canary::new(v)).unwrap()).collect();
        let refs: Vec<_> = ids.iter().map(|id| table.get_ref(*id).unwrap()).collect();
        let other = thread::spawn({
            let refs = refs.clone();
            move || refs.iter().map(|context| context.read()).sum::<u64>()
        });
        if rng.usize(..2) == 0 {
            table.remove(ids[1]).unwrap();
        }
        drop(refs);
        drop(table);
        rcu::poll();
        assert_eq!(other.join().unwrap(), 3);
    });
    assert_eq!(ALIVE.load(Relaxed), 0);
}

#[test]
#[ignore = "stress: seconds of growth"]
fn stress_inv17_permanent_ids_are_found_throughout_growth() {
    let (table, none) = (CtxTable::new(), Board::new(0));
    let mut permanent = Vec::new();
    for index in 0..=20_000 {
        let id = table.insert(Canary::new(index)).unwrap();
        if [0, 1, 63, 64, 700, 4_095, 4_096, 20_000].contains(&index) {
            permanent.push(id);
        }
    }
    table.retain(|id, _| permanent.contains(&id));
    storm(5, |me, rng| {
        if me < 2 {
            let many = 1 + rng.usize(..30_000);
            let ids: Vec<Id> = (0..many).map(|_| table.insert(Canary::new(7)).unwrap()).collect();
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
    end(table, &none, permanent.len());
}

/// Of many removals of one context one succeeds.
#[test]
#[ignore = "stress: seconds of removals"]
fn stress_inv14_one_of_many_removes() {
    let (table, board) = (CtxTable::new(), Board::new(1));
    let (inserted, removed) = (AtomicU64::new(0), AtomicU64::new(0));
    storm(4, |me, rng| {
        if me == 0 && board.get(0).is_none_or(|id| !table.contains(id)) {
            board.0[0].store(table.insert(Canary::new(1)).unwrap().to_bits(), Relaxed);
            inserted.fetch_add(1, Relaxed);
        }
        if let Some(id) = board.get(0) {
            removed.fetch_add(table.remove(id).is_ok().into(), Relaxed);
        }
        if rng.usize(..200) == 0 {
            table.flush().unwrap();
        }
    });
    let left = inserted.into_inner() - removed.into_inner();
    assert_eq!(table.len() as u64, left);
    board.0[0].store(0, Relaxed);
    end(table, &board, left as usize);
}

/// Runs all tests of this file in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_without_rseq() {
    rerun_without_rseq("stress_inv");
}
