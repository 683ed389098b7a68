//! `RefBlock` on this kernel, owned by a structure like a table.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::{RefBlock, fence, rcu};

use crate::ledger::{Account, Objects, beside_users, storm};
use testkit::rng;
use testkit::wait::wait_for;

const DEAD: u64 = 1 << 63;

/// A block, and for each of its counts in use a gate with the number of a life.
struct Table {
    block: RefBlock,
    slots: Vec<(AtomicU64, Account)>,
}

impl Objects for Table {
    fn len(&self) -> usize {
        self.slots.len()
    }

    fn account(&self, i: usize) -> &Account {
        &self.slots[i].1
    }

    fn life(&self, i: usize) -> Option<u64> {
        Some(self.slots[i].0.load(Relaxed)).filter(|life| life & DEAD == 0)
    }

    fn try_get(&self, i: usize, life: u64, twice: bool) -> bool {
        let _guard = rcu::pin();
        let gate = &self.slots[i].0;
        let got = self.block.try_get(i, gate, life);
        if got && twice {
            self.block.get_more(i, gate, life);
        }
        got
    }

    fn put(&self, i: usize, life: u64) {
        // SAFETY: the caller owns this reference, and the table outlives all threads.
        if unsafe { RefBlock::put(&self.block, i, &self.slots[i].0, life) } {
            self.slots[i].1.end(life);
        }
    }
}

impl Table {
    fn new(used: usize) -> Self {
        let slots = (0..used).map(|_| (AtomicU64::new(DEAD), Account::default())).collect();
        Self { block: RefBlock::try_new().unwrap(), slots }
    }

    /// Ends the lives of the objects in `batch` with one barrier. They begin again after a grace
    /// period.
    fn kill(&self, batch: &[usize]) {
        for &i in batch {
            self.slots[i].0.store(DEAD, Relaxed);
        }
        fence::heavy_rseq();
        for &i in batch {
            if self.block.fold(i) {
                self.slots[i].1.end(self.slots[i].1.began());
            }
        }
        rcu::synchronize().unwrap();
    }
}

/// Begins and ends lives of every slot with the remainder `seed` modulo `owners`. Returns the
/// number of lives.
fn own(table: &Table, until: Instant, seed: usize, owners: usize) -> u64 {
    let mut rng = rng::seeded(seed as u64 + 99);
    let mut life = 0;
    while Instant::now() < until {
        let mut batch = Vec::new();
        for i in (seed..table.slots.len()).step_by(owners) {
            let (gate, account) = &table.slots[i];
            if table.life(i).is_some() {
                batch.extend((rng.usize(..4) != 0).then_some(i));
            } else if account.has_ended() {
                life += 1;
                account.begin(life);
                table.block.open(i);
                gate.store(life, Release);
            }
        }
        if rng.usize(..4) == 0 {
            thread::yield_now();
        }
        table.kill(&batch);
    }
    life
}

/// Returns the numbers of gets and of lives.
fn lives_until(until: Instant, slots: usize, users: u64, owners: usize) -> (u64, u64) {
    let table = Table::new(slots);
    let own_all = || {
        thread::scope(|scope| {
            let table = &table;
            let owners = (0..owners).map(|n| scope.spawn(move || own(table, until, n, owners)));
            let owners: Vec<_> = owners.collect();
            owners.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        })
    };
    let counts = beside_users(&table, users, own_all);
    let live: Vec<_> = (0..slots).filter(|&i| table.life(i).is_some()).collect();
    table.kill(&live);
    assert!(table.slots.iter().all(|(_, account)| account.has_ended()), "every life ended once");
    counts
}

#[test]
#[ignore = "stress: five seconds of lives"]
fn stress_inv21_a_storm_of_lives_agrees_with_the_ledger() {
    storm(|until| lives_until(until, RefBlock::COUNTS, 6, 2));
}

#[test]
#[ignore = "stress: five seconds of lives"]
fn stress_inv21_a_storm_of_lives_of_one_slot_agrees_with_the_ledger() {
    storm(|until| lives_until(until, 1, 4, 1));
}

#[test]
fn inv21_a_short_storm_agrees_with_the_ledger() {
    let (mut gets, mut lives) = (0, 0);
    // On a busy machine, not all threads run in the first half second.
    wait_for("gets, and a second life", || {
        let more = lives_until(Instant::now() + Duration::from_millis(500), 8, 4, 1);
        (gets, lives) = (gets + more.0, lives + more.1);
        gets > 0 && lives > 8
    });
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

/// A fold leaves the words of sections unchanged, and the fold of the next life counts only the difference.
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
