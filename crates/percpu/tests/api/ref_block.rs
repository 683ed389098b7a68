//! `RefBlock` on this kernel, owned by a structure like a table: threads get, put and kill, and a
//! ledger checks every count.
//!
//! The ignored test runs for `OFFLOCK_STRESS_SECONDS` (default 5).

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::{RefBlock, capabilities, fence, rcu};

use crate::no_id::take_id;
use testkit::pin::{allowed_cpus, pin_to};
use testkit::rng;
use testkit::stress::keep_running;
use testkit::stress::stress_time;

const DEAD: u64 = 1 << 63;

/// An object: its state, the number of its life, and the ledger for its count.
#[derive(Default)]
struct Slot {
    state: AtomicU64,
    /// The number of references that threads hold.
    inside: AtomicI64,
    /// The last life that began, and the last that ended.
    began: AtomicU64,
    ended: AtomicU64,
}

struct Table {
    block: RefBlock,
    slots: Vec<Slot>,
}

impl Table {
    fn new(used: usize) -> Self {
        let slots = (0..used).map(|_| Slot { state: DEAD.into(), ..Slot::default() }).collect();
        Self { block: RefBlock::try_new().unwrap(), slots }
    }

    fn begin(&self, i: usize, life: u64) {
        let slot = &self.slots[i];
        assert_eq!(slot.ended.load(SeqCst), slot.began.swap(life, SeqCst), "one life at a time");
        self.block.open(i);
        slot.state.store(life, Release);
    }

    fn try_get(&self, i: usize, life: u64) -> bool {
        let _guard = rcu::pin();
        let slot = &self.slots[i];
        let got = self.block.try_get(i, &slot.state, life);
        if got {
            slot.inside.fetch_add(1, SeqCst);
            self.check(i, life);
        }
        got
    }

    fn clone(&self, i: usize, life: u64) {
        self.block.get_more(i, &self.slots[i].state, life);
        self.slots[i].inside.fetch_add(1, SeqCst);
        self.check(i, life);
    }

    /// Notes that the caller has a reference.
    fn check(&self, i: usize, life: u64) {
        let slot = &self.slots[i];
        let (began, ended) = (slot.began.load(SeqCst), slot.ended.load(SeqCst));
        assert_eq!((began, ended < life), (life, true), "a reference of an ended life");
    }

    fn put(&self, i: usize, life: u64) {
        let slot = &self.slots[i];
        self.check(i, life);
        slot.inside.fetch_sub(1, SeqCst);
        // SAFETY: the caller owns this reference, and the table outlives all threads.
        if unsafe { RefBlock::put(&self.block, i, &slot.state, life) } {
            self.end(i, life);
        }
    }

    fn end(&self, i: usize, life: u64) {
        let slot = &self.slots[i];
        assert_eq!(slot.inside.load(SeqCst), 0, "ended while a thread has a reference");
        assert_eq!(slot.began.load(SeqCst), life);
        assert_ne!(slot.ended.swap(life, SeqCst), life, "ended twice");
    }

    /// Ends the lives of the objects in `batch` with one barrier. They begin again after a grace
    /// period.
    fn kill(&self, batch: &[usize]) {
        for &i in batch {
            self.slots[i].state.store(DEAD, Relaxed);
        }
        fence::heavy_rseq();
        for &i in batch {
            if self.block.fold(i) {
                self.end(i, self.slots[i].began.load(SeqCst));
            }
        }
        rcu::synchronize().unwrap();
    }
}

/// Gets, clones and puts references. Some threads have no CPU id, and some references are put by
/// another thread than took them.
fn use_slots(table: &Table, stash: &Mutex<Vec<(usize, u64)>>, stop: &AtomicBool, seed: u64) -> u64 {
    if seed % 4 == 3 {
        take_id();
    }
    let (cpus, mut rng, mut gets) = (allowed_cpus(), rng::seeded(seed), 0);
    let mut stale = 0;
    while !stop.load(Relaxed) {
        let i = rng.usize(..table.slots.len());
        // Sometimes the number of an ended life, for which a get must fail.
        let life = match rng.usize(..16) {
            0 => stale,
            _ => table.slots[i].state.load(Relaxed),
        };
        stale = life;
        if life & DEAD == 0 && table.try_get(i, life) {
            gets += 1;
            let cloned = rng.usize(..4) == 0;
            if cloned {
                table.clone(i, life);
            }
            if rng.usize(..64) == 0 {
                pin_to(&[cpus[rng.usize(..cpus.len())]]);
            }
            if rng.usize(..8) == 0 {
                stash.lock().unwrap().push((i, life));
            } else {
                table.put(i, life);
            }
            if cloned {
                table.put(i, life);
            }
        }
        if rng.usize(..8) == 0 {
            let taken = stash.lock().unwrap().pop();
            taken.into_iter().for_each(|(i, life)| table.put(i, life));
        }
    }
    gets
}

/// Begins and ends lives of every slot with the remainder `seed` modulo `owners`. Returns the
/// number of lives.
fn own(table: &Table, stop: &AtomicBool, seed: usize, owners: usize) -> u64 {
    let mut rng = rng::seeded(seed as u64 + 99);
    let mine: Vec<usize> = (seed..table.slots.len()).step_by(owners).collect();
    let mut life = 0;
    while !stop.load(Relaxed) {
        let mut batch = Vec::new();
        for &i in &mine {
            let slot = &table.slots[i];
            if slot.state.load(Relaxed) == DEAD {
                if slot.began.load(SeqCst) == slot.ended.load(SeqCst) {
                    life += 1;
                    table.begin(i, life);
                }
            } else if rng.usize(..4) != 0 {
                batch.push(i);
            }
        }
        if rng.usize(..4) == 0 {
            thread::yield_now();
        }
        table.kill(&batch);
    }
    life
}

fn storm(slots: usize, users: u64, owners: usize) {
    let until = Instant::now() + stress_time(5);
    let (mut gets, mut lives) = (0, 0);
    while keep_running(until, || gets > 10_000 && lives > 100) {
        let more = lives_until(until.max(Instant::now() + AGAIN), slots, users, owners);
        (gets, lives) = (gets + more.0, lives + more.1);
    }
    println!("{}: {gets} gets, {lives} lives", capabilities());
    assert!(gets > 10_000 && lives > 100);
}

/// The time of each further round, if the first one did too little.
const AGAIN: Duration = Duration::from_millis(500);

/// Returns the numbers of gets and of lives.
fn lives_until(until: Instant, slots: usize, users: u64, owners: usize) -> (u64, u64) {
    let (table, stash) = (Table::new(slots), Mutex::default());
    let stop = AtomicBool::new(false);
    let counts = thread::scope(|scope| {
        let (table, stash, stop) = (&table, &stash, &stop);
        let users: Vec<_> =
            (0..users).map(|n| scope.spawn(move || use_slots(table, stash, stop, n))).collect();
        let owners: Vec<_> =
            (0..owners).map(|n| scope.spawn(move || own(table, stop, n, owners))).collect();
        let all = || users.iter().chain(&owners);
        while Instant::now() < until && !all().any(|thread| thread.is_finished()) {
            thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, SeqCst);
        let sum = |threads: Vec<thread::ScopedJoinHandle<'_, u64>>| {
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        };
        (sum(users), sum(owners))
    });
    for (i, life) in stash.into_inner().unwrap() {
        table.put(i, life);
    }
    let live: Vec<_> = (0..slots).filter(|&i| table.slots[i].state.load(SeqCst) != DEAD).collect();
    table.kill(&live);
    for slot in &table.slots {
        assert_eq!(slot.inside.load(SeqCst), 0);
        assert_eq!(slot.began.load(SeqCst), slot.ended.load(SeqCst), "every life ended once");
    }
    counts
}

#[test]
#[ignore = "stress: five seconds of lives"]
fn stress_inv21_a_storm_of_lives_agrees_with_the_ledger() {
    storm(RefBlock::COUNTS, 6, 2);
}

#[test]
#[ignore = "stress: five seconds of lives"]
fn stress_inv21_a_storm_of_lives_of_one_slot_agrees_with_the_ledger() {
    storm(1, 4, 1);
}

/// The same for a second, in every test run.
#[test]
fn inv21_a_short_storm_agrees_with_the_ledger() {
    let (table, stash, stop) = (Table::new(8), Mutex::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        for seed in [1, 3] {
            let (table, stash, stop) = (&table, &stash, &stop);
            scope.spawn(move || use_slots(table, stash, stop, seed));
        }
        for _ in 0..50 {
            for i in 0..8 {
                let slot = &table.slots[i];
                if slot.began.load(SeqCst) == slot.ended.load(SeqCst) {
                    table.begin(i, slot.began.load(SeqCst) + 1);
                }
            }
            thread::yield_now();
            let live: Vec<_> =
                (0..8).filter(|&i| table.slots[i].state.load(SeqCst) != DEAD).collect();
            table.kill(&live);
        }
        stop.store(true, SeqCst);
    });
    for (i, life) in stash.into_inner().unwrap() {
        table.put(i, life);
    }
    assert!(table.slots.iter().all(|slot| slot.began.load(SeqCst) == slot.ended.load(SeqCst)));
}

const OPEN: u64 = 5 << 33;

/// Ends the life of count `i`. Returns true if no reference is left.
fn kill(block: &RefBlock, i: usize, gate: &AtomicU64) -> bool {
    gate.store(0, Relaxed);
    fence::heavy_rseq();
    block.fold(i)
}

fn put(block: &RefBlock, i: usize, gate: &AtomicU64) -> bool {
    // SAFETY: each test puts only references that it took, and keeps the block.
    unsafe { RefBlock::put(block, i, gate, OPEN) }
}

#[test]
fn inv21_each_count_of_a_block_ends_by_itself() {
    let block = RefBlock::try_new().unwrap();
    let gates = [(); RefBlock::COUNTS].map(|()| AtomicU64::new(0));
    for round in 0..3 {
        for (i, gate) in gates.iter().enumerate() {
            assert!(!block.try_get(i, gate, OPEN), "closed");
            block.open(i);
            gate.store(OPEN, Release);
            for _ in 0..=i {
                assert!(block.try_get(i, gate, OPEN) && !block.try_get(i, gate, OPEN + 1));
            }
        }
        for (i, gate) in gates.iter().enumerate() {
            assert!(!put(&block, i, gate));
            assert_eq!(kill(&block, i, gate), i == 0, "round {round}, {i} are left");
            assert!(!block.try_get(i, gate, OPEN) && !block.try_get(i, gate, 1));
            block.get_more(i, gate, OPEN);
            for left in (0..=i).rev() {
                if i > 0 || left > 0 {
                    assert_eq!(put(&block, i, gate), left == 0);
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "word 64 of 64")]
fn an_index_beyond_the_block_panics() {
    let block = RefBlock::try_new().unwrap();
    let _ = block.try_get(RefBlock::COUNTS, &AtomicU64::new(0), 0);
}

/// The values that a block leaves in its words do not reach the next block in the same memory.
#[test]
fn inv21_a_new_block_starts_from_zero() {
    for _ in 0..200 {
        let (block, gate) = (RefBlock::try_new().unwrap(), AtomicU64::new(OPEN));
        block.open(63);
        assert!(block.try_get(63, &gate, OPEN) && block.try_get(63, &gate, OPEN));
        assert!(!kill(&block, 63, &gate));
        assert!(!put(&block, 63, &gate) && put(&block, 63, &gate));
    }
}

/// Threads take references and exit; other threads put them.
#[test]
fn inv21_exited_threads_leave_the_count_right() {
    let block = Arc::new(RefBlock::try_new().unwrap());
    let gate = Arc::new(AtomicU64::new(OPEN));
    block.open(3);
    let all = |f: fn(&RefBlock, &AtomicU64) -> u64| -> u64 {
        let threads = [(); 8].map(|()| {
            let (block, gate) = (Arc::clone(&block), Arc::clone(&gate));
            thread::spawn(move || f(&block, &gate))
        });
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    };
    assert_eq!(all(|block, gate| u64::from(block.try_get(3, gate, OPEN))), 8);
    assert!(!kill(&block, 3, &gate));
    assert_eq!(all(|block, gate| u64::from(put(block, 3, gate))), 1);
}

/// A fold leaves the words of sections unchanged, and the next fold counts only the difference.
#[test]
fn inv21_the_fold_counts_the_difference_only() {
    let (block, gate) = (RefBlock::try_new().unwrap(), AtomicU64::new(0));
    for _life in 0..5 {
        block.open(9);
        gate.store(OPEN, Release);
        for _ in 0..3 {
            assert!(block.try_get(9, &gate, OPEN));
        }
        assert!(!kill(&block, 9, &gate));
        assert!(!put(&block, 9, &gate) && !put(&block, 9, &gate) && put(&block, 9, &gate));
    }
}
