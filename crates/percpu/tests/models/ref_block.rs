//! The block of reference counts.
//!
//! A [`Table`] is the owner: one slot with a state word, the gate, and a value. The put that returns
//! true frees the value. A thread that looks at the value holds a reference. So an end that comes
//! early, or that is not ordered after every look, fails the model. An end that comes twice frees
//! twice, and one that never comes is missing in the count of ends.

use offlock_percpu::{CpuId, RefBlock, fence};
use offlock_sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::virtual_cpu::{set_current, take_id};
use offlock_sync::{Arc, is_planted, step, thread};

use super::{both_modes, model};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("put: the use is done", "ref_block::inv21_one_of_two_puts_after_the_fold_is_the_last"),
    (
        "kill a count: no section still counts",
        "ref_block::inv21_a_life_ends_once_and_after_every_look",
    ),
    ("fold: the holders of the word", "ref_block::inv21_the_fold_sees_what_holders_did"),
    ("fold: only since the last fold", "ref_block::inv21_nothing_of_a_life_counts_in_the_next"),
    ("open a count: from zero", "ref_block::inv21_nothing_of_a_life_counts_in_the_next"),
    (
        "begin: the gate opens before the count",
        "ref_block::inv21_a_get_races_with_the_beginning_of_a_life",
    ),
    ("get a count: its gate is open", "ref_block::inv21_an_old_name_gets_nothing_in_the_next_life"),
    ("section: its gate is open", "ref_block::inv21_an_old_name_gets_nothing_in_the_next_life"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] = &["put: the use is done", "fold: the holders of the word"];

/// The count in use, so that its neighbour is beside it.
const I: usize = RefBlock::COUNTS - 1;
/// Names of lives, and what is none.
const FIRST: u64 = 1 << 40;
const SECOND: u64 = 2 << 40;
const DEAD: u64 = 1 << 63;

struct Table {
    block: RefBlock,
    gate: AtomicU64,
    value: AtomicPtr<Watched<u64>>,
    ends: AtomicUsize,
}

impl Table {
    /// With a slot that holds nothing.
    fn empty() -> Self {
        Self {
            block: RefBlock::try_new().unwrap(),
            gate: AtomicU64::new(DEAD),
            value: AtomicPtr::new(std::ptr::null_mut()),
            ends: AtomicUsize::new(0),
        }
    }

    fn new() -> Arc<Self> {
        let table = Self::empty();
        table.begin(FIRST);
        Arc::new(table)
    }

    fn begin(&self, life: u64) {
        self.value.store(Box::into_raw(Box::new(Watched::new(life))), Ordering::Relaxed);
        if is_planted("begin: the gate opens before the count") {
            self.gate.store(life, Ordering::Release);
            return self.block.open(I);
        }
        self.block.open(I);
        // Ordering: Release pairs with the Acquire in `try_get`; it carries the value and the count.
        self.gate.store(life, Ordering::Release);
    }

    fn try_get(&self, life: u64) -> bool {
        self.block.try_get(I, &self.gate, life)
    }

    /// The caller holds a reference.
    fn look(&self, life: u64) {
        // SAFETY: freed by `end` only, and the caller's reference keeps that away.
        assert_eq!(**unsafe { &*self.value.load(Ordering::Relaxed) }, life);
    }

    /// Looks, and puts the caller's reference.
    fn leave(&self, life: u64) {
        self.look(life);
        // SAFETY: the caller's reference; the table outlives the models' threads.
        if unsafe { RefBlock::put(&self.block, I, &self.gate, life) } {
            self.end();
        }
    }

    fn try_look(&self, life: u64) -> bool {
        let got = self.try_get(life);
        if got {
            self.leave(life);
        }
        got
    }

    fn kill(&self) {
        // Ordering: Relaxed; the barrier makes every later section see it.
        self.gate.store(DEAD, Ordering::Relaxed);
        step!("kill a count: no section still counts", fence::heavy_rseq());
        if self.block.fold(I) {
            self.end();
        }
    }

    fn end(&self) {
        self.ends.fetch_add(1, Ordering::Relaxed);
        let value = self.value.load(Ordering::Relaxed);
        // SAFETY: from `begin`; no reference is left, and this is the end of that life.
        free(unsafe { Box::from_raw(value) });
    }

    fn assert_ended(&self, lives: usize) {
        assert_eq!(self.ends.load(Ordering::Relaxed), lives);
        assert!(!self.try_get(FIRST) && !self.try_get(SECOND));
    }
}

fn spawn(table: &Arc<Table>, f: impl FnOnce(&Table) + Send + 'static) -> thread::JoinHandle<()> {
    let table = Arc::clone(table);
    thread::spawn(move || f(&table))
}

/// Gets, puts and a clone on both CPUs, a reference that moves between them, and a kill in the
/// middle.
#[test]
fn inv21_a_life_ends_once_and_after_every_look() {
    both_modes(|| {
        let table = Table::new();
        assert!(table.try_get(FIRST));
        let other = spawn(&table, |table| {
            set_current(CpuId::new(1));
            table.leave(FIRST); // the one taken on the other CPU
            table.try_look(FIRST);
        });
        table.kill();
        assert!(!table.try_get(FIRST));
        other.join().unwrap();
        table.assert_ended(1);
    });
}

/// A holder clones and puts both, moving, while the owner kills.
#[test]
fn inv21_a_clone_during_the_kill_counts() {
    both_modes(|| {
        let table = Table::new();
        assert!(table.try_get(FIRST));
        let other = spawn(&table, |table| {
            table.block.get_more(I, &table.gate, FIRST);
            set_current(CpuId::new(1));
            table.leave(FIRST);
            table.leave(FIRST);
        });
        table.kill();
        other.join().unwrap();
        table.assert_ended(1);
    });
}

/// Two holders put after the fold, or around it: one of them is the last.
#[test]
fn inv21_one_of_two_puts_after_the_fold_is_the_last() {
    both_modes(|| {
        let table = Table::new();
        assert!(table.try_get(FIRST) && table.try_get(FIRST));
        let other = spawn(&table, |table| {
            set_current(CpuId::new(1));
            table.leave(FIRST);
        });
        table.kill();
        table.leave(FIRST);
        other.join().unwrap();
        table.assert_ended(1);
    });
}

/// Puts in the words only: the fold alone orders them before the end.
#[test]
fn inv21_the_fold_sees_what_holders_did() {
    both_modes(|| {
        let table = Table::new();
        let others = [0, 1].map(|cpu| {
            spawn(&table, move |table| {
                set_current(CpuId::new(cpu));
                table.try_look(FIRST);
            })
        });
        table.kill();
        for other in others {
            other.join().unwrap();
        }
        table.assert_ended(1);
    });
}

/// Threads without an id count in the remote word, also one that puts what another took.
#[test]
fn inv21_threads_without_id_count_remotely() {
    model(|| {
        let table = Table::new();
        assert!(table.try_get(FIRST));
        let first = spawn(&table, |table| {
            take_id();
            table.leave(FIRST);
        });
        let second = spawn(&table, |table| {
            take_id();
            table.try_look(FIRST);
        });
        table.kill();
        first.join().unwrap();
        second.join().unwrap();
        table.assert_ended(1);
    });
}

/// Users of one life meet its kill; when they are gone (the joins stand for the grace period) the
/// next begins, whose count is its own: exactly one reference is open when it is killed.
#[test]
fn inv21_nothing_of_a_life_counts_in_the_next() {
    for id in [true, false] {
        both_modes(move || {
            let table = Table::new();
            assert!(table.try_get(FIRST));
            let user = spawn(&table, move |table| {
                if !id {
                    take_id();
                }
                table.leave(FIRST); // leaves the CPU's word at -1 or void
                set_current(CpuId::new(1));
                table.try_look(FIRST);
            });
            table.kill();
            user.join().unwrap();
            assert_eq!(table.ends.load(Ordering::Relaxed), 1);
            table.begin(SECOND);
            assert!(table.try_get(SECOND), "it lives");
            let user = spawn(&table, |table| _ = table.try_look(SECOND));
            table.kill();
            user.join().unwrap();
            assert_eq!(table.ends.load(Ordering::Relaxed), 1, "one reference is left");
            table.leave(SECOND);
            table.assert_ended(2);
        });
    }
}

/// An id of the life before is refused in the next, by every way to count.
#[test]
fn inv21_an_old_name_gets_nothing_in_the_next_life() {
    for id in [true, false] {
        both_modes(move || {
            let table = Table::new();
            table.kill();
            table.begin(SECOND);
            let user = spawn(&table, move |table| {
                if !id {
                    take_id();
                }
                assert!(!table.try_get(FIRST) && !table.try_get(DEAD - 1));
                table.try_look(SECOND);
            });
            table.kill();
            user.join().unwrap();
            table.assert_ended(2);
        });
    }
}

/// A thread that sees the gate open finds the count open, and counts in this life.
#[test]
fn inv21_a_get_races_with_the_beginning_of_a_life() {
    for id in [true, false] {
        both_modes(move || {
            let table = Arc::new(Table::empty());
            let user = spawn(&table, move |table| {
                if !id {
                    take_id();
                }
                set_current(CpuId::new(1));
                // Ordering: Acquire, both; what the gate says is what holds from then on.
                let lives = table.gate.load(Ordering::Acquire) == FIRST;
                let refused = !table.try_look(FIRST);
                assert!(!(lives && refused) || table.gate.load(Ordering::Acquire) == DEAD);
            });
            table.begin(FIRST);
            table.kill();
            user.join().unwrap();
            table.assert_ended(1);
        });
    }
}

/// The two counts of a block do not meet.
#[test]
fn inv21_a_neighbour_has_a_count_of_its_own() {
    both_modes(|| {
        let table = Table::new();
        let gate = Arc::new(AtomicU64::new(FIRST));
        table.block.open(0);
        let user = spawn(&table, {
            let gate = Arc::clone(&gate);
            move |table| {
                assert!(table.block.try_get(0, &gate, FIRST));
                table.try_look(FIRST);
            }
        });
        table.kill();
        user.join().unwrap();
        table.assert_ended(1);
        gate.store(DEAD, Ordering::Relaxed);
        fence::heavy_rseq();
        assert!(!table.block.fold(0), "one is left");
        // SAFETY: the one that the user took.
        assert!(unsafe { RefBlock::put(&table.block, 0, &*gate, FIRST) });
    });
}

struct Address(*mut Watched<Table>);

// SAFETY: an address; the model decides which thread uses it.
unsafe impl Send for Address {}

impl Address {
    /// Looks and puts; the last put frees everything, the block and the gate too.
    fn leave(&self) {
        // SAFETY: the caller's reference keeps it alive until the put.
        let table: &Table = unsafe { &*self.0 };
        table.look(FIRST);
        let (block, gate) = (&raw const table.block, &raw const table.gate);
        // SAFETY: the caller's reference, put once.
        if unsafe { RefBlock::put(block, I, gate, FIRST) } {
            self.end();
        }
    }

    fn end(&self) {
        // SAFETY: from a box; no reference is left, and only one put returns true.
        let table = unsafe { Box::from_raw(self.0) };
        table.end();
        free(table);
    }
}

/// A put that is not the last may be the last thing that its block sees, in the words as in the
/// atomic.
#[test]
fn inv21_the_last_put_may_free_the_block() {
    for killed_before in [true, false] {
        both_modes(move || {
            let table = Table::empty();
            table.begin(FIRST);
            assert!(table.try_get(FIRST) && table.try_get(FIRST));
            let ours = Address(Box::into_raw(Box::new(Watched::new(table))));
            let theirs = Address(ours.0);
            // SAFETY: our reference keeps it alive.
            let table: &Table = unsafe { &*ours.0 };
            let kill = move || {
                table.gate.store(DEAD, Ordering::Relaxed);
                fence::heavy_rseq();
                assert!(!table.block.fold(I), "ours is left");
            };
            if killed_before {
                kill();
            }
            let other = thread::spawn(move || {
                set_current(CpuId::new(1));
                theirs.leave();
            });
            if !killed_before {
                kill();
            }
            ours.leave();
            other.join().unwrap();
        });
    }
}
