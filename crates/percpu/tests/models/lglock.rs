//! The local-global locks.
//!
//! The value is an atomic that is read and written in two steps, so that only the lock makes the
//! total right (shuttle sees that); and every use of a guard goes through a checked cell, so that
//! two uses which no ordering separates fail (loom sees that). Where a wake-up is lost, the model
//! deadlocks.

use percpu::CpuId;
use percpu::lglock::{BiasedLgLock, LgLock, LockError};
use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::virtual_cpu::{both_modes, set_current, take_id};
use percpu::sync::{Arc, model, thread};

type Plain = LgLock<AtomicU64>;
type Biased = BiasedLgLock<AtomicU64>;

const ZERO: CpuId = CpuId::new(0);
const ONE: CpuId = CpuId::new(1);

/// Adds 1 in two steps.
fn add(value: &AtomicU64) {
    // Ordering: Relaxed, both; the lock orders them.
    let seen = value.load(Ordering::Relaxed);
    value.store(seen + 1, Ordering::Relaxed);
}

/// Runs two threads on one lock, the second as a spawned one, and returns the values of the slots.
macro_rules! two {
    ($lock:expr, $here:expr, $there:expr) => {{
        let lock = Arc::new($lock);
        let other = thread::spawn({
            let lock = Arc::clone(&lock);
            move || $there(&lock)
        });
        $here(&lock);
        other.join().unwrap();
        totals(lock)
    }};
}

/// The values, after every other thread is gone.
fn totals<L: IntoIterator<Item = (CpuId, AtomicU64)>>(lock: Arc<L>) -> [u64; 2] {
    let mut totals = [0; 2];
    for (cpu, value) in Arc::try_unwrap(lock).ok().expect("the others are gone") {
        // Ordering: Relaxed; the join ordered it.
        totals[cpu.index()] = value.load(Ordering::Relaxed);
    }
    totals
}

/// What a thread does with the lock: the same for both kinds.
macro_rules! operations {
    ($kind:ident, $lock:ty) => {
        mod $kind {
            use super::*;

            pub(super) fn make() -> $lock {
                <$lock>::new(|_| AtomicU64::new(0))
            }

            pub(super) fn local(lock: &$lock) {
                add(&*lock.local().unwrap());
            }

            /// From the other CPU than where a thread starts.
            pub(super) fn remote(lock: &$lock) {
                set_current(ONE);
                add(&*lock.local_on(ZERO).unwrap());
            }

            pub(super) fn pair(lock: &$lock) {
                let both = lock.pair(ZERO, ONE).unwrap();
                add(both.get().0);
                add(both.get().1);
            }

            pub(super) fn pair_backwards(lock: &$lock) {
                let mut both = lock.pair(ONE, ZERO).unwrap();
                assert_eq!(both.cpus(), (ONE, ZERO));
                add(both.get_mut().1);
                add(both.get_mut().0);
            }

            pub(super) fn global(lock: &$lock) {
                set_current(ONE);
                for (_, value) in &mut lock.global().unwrap() {
                    add(value);
                }
            }

            /// Locks on CPU 0 and unlocks on CPU 1.
            pub(super) fn migrate(lock: &$lock) {
                let guard = lock.local().unwrap();
                assert_eq!(guard.cpu(), ZERO);
                set_current(ONE);
                add(&guard);
                drop(guard);
                // Free is what was locked, and only that.
                if let Ok(guard) = lock.try_local_on(ONE) {
                    assert_eq!(guard.cpu(), ONE);
                }
            }

            /// Takes what it can get without waiting, and says whether it did.
            pub(super) fn try_local(lock: &$lock) -> bool {
                match lock.try_local() {
                    Ok(guard) => {
                        add(&guard);
                        true
                    }
                    Err(error) => {
                        assert_eq!(error, LockError::WouldBlock);
                        false
                    }
                }
            }

            pub(super) fn try_global(lock: &$lock) -> bool {
                match lock.try_global() {
                    Ok(guard) => {
                        guard.iter().for_each(|(_, value)| add(value));
                        true
                    }
                    Err(error) => {
                        assert_eq!(error, LockError::WouldBlock);
                        false
                    }
                }
            }
        }
    };
}

operations!(plain, Plain);
operations!(biased, Biased);

#[test]
fn plain_two_locals_exclude_each_other_on_a_slot() {
    model(|| assert_eq!(two!(plain::make(), plain::local, plain::local), [2, 0]));
}

/// Without sections a biased lock is a plain one, so the two run the same models.
#[test]
fn biased_two_locals_exclude_each_other_on_a_slot() {
    both_modes(|| assert_eq!(two!(biased::make(), biased::local, biased::local), [2, 0]));
}

#[test]
fn plain_local_and_local_on_exclude_each_other() {
    model(|| assert_eq!(two!(plain::make(), plain::local, plain::remote), [2, 0]));
}

#[test]
fn biased_local_and_local_on_exclude_each_other() {
    both_modes(|| assert_eq!(two!(biased::make(), biased::local, biased::remote), [2, 0]));
}

#[test]
fn plain_local_and_global_exclude_each_other() {
    model(|| assert_eq!(two!(plain::make(), plain::local, plain::global), [2, 1]));
}

#[test]
fn biased_local_and_global_exclude_each_other() {
    both_modes(|| assert_eq!(two!(biased::make(), biased::local, biased::global), [2, 1]));
}

#[test]
fn plain_pairs_named_in_opposite_order_do_not_deadlock() {
    model(|| assert_eq!(two!(plain::make(), plain::pair, plain::pair_backwards), [2, 2]));
}

#[test]
fn biased_pairs_named_in_opposite_order_do_not_deadlock() {
    both_modes(|| assert_eq!(two!(biased::make(), biased::pair, biased::pair_backwards), [2, 2]));
}

#[test]
fn plain_globals_exclude_each_other() {
    model(|| assert_eq!(two!(plain::make(), plain::global, plain::global), [2, 2]));
}

#[test]
fn biased_globals_exclude_each_other() {
    both_modes(|| assert_eq!(two!(biased::make(), biased::global, biased::global), [2, 2]));
}

#[test]
fn plain_global_and_a_pair_exclude_each_other() {
    model(|| assert_eq!(two!(plain::make(), plain::global, plain::pair_backwards), [2, 2]));
}

/// As many slots as were asked for, on a machine that has another number of CPUs.
#[test]
fn plain_a_single_slot_excludes_and_a_third_is_one_more() {
    model(|| {
        let lock = LgLock::try_with_slots(1, |_| AtomicU64::new(0)).unwrap();
        assert_eq!(two!(lock, plain::local, plain::remote), [2, 0]);
    });
    model(|| {
        let lock = Arc::new(LgLock::try_with_slots(3, |_| AtomicU64::new(0)).unwrap());
        let third = |lock: &Plain| add(&lock.local_on(CpuId::new(2)).unwrap());
        let other = thread::spawn({
            let lock = Arc::clone(&lock);
            move || third(&lock)
        });
        third(&lock);
        other.join().unwrap();
        let all = lock.try_global().expect("everything is free again");
        let totals: Vec<_> = all.iter().map(|(_, value)| value.load(Ordering::Relaxed)).collect();
        assert_eq!(totals, [0, 0, 2]);
    });
}

/// Three for one slot: whoever is woken wakes the next.
#[test]
fn plain_three_on_one_slot_all_get_it() {
    model(|| {
        let lock = Arc::new(plain::make());
        let others = [plain::local, plain::remote].map(|other| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || other(&lock))
        });
        plain::local(&lock);
        for other in others {
            other.join().unwrap();
        }
        assert_eq!(totals(lock), [3, 0]);
    });
}

/// A guard is dropped while one thread waits for the slot and another for all of them.
#[test]
fn biased_a_local_and_a_global_both_wait_for_a_guard() {
    both_modes(|| {
        let lock = Arc::new(biased::make());
        let guard = lock.local().unwrap();
        let others = [biased::local, biased::global].map(|other| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || other(&lock))
        });
        add(&guard);
        if cfg!(offlock_shuttle) {
            (0..30).for_each(|_| thread::yield_now()); // chance alone rarely lets both wait
        }
        drop(guard);
        for other in others {
            other.join().unwrap();
        }
        assert_eq!(totals(lock), [3, 1]);
    });
}

#[test]
fn inv02_plain_a_guard_unlocks_its_slot_after_a_migration() {
    model(|| assert_eq!(two!(plain::make(), plain::migrate, plain::local), [2, 0]));
}

#[test]
fn inv02_biased_a_guard_unlocks_its_slot_after_a_migration() {
    both_modes(|| assert_eq!(two!(biased::make(), biased::migrate, biased::local), [2, 0]));
}

/// Locked on CPU 0, unlocked on CPU 1, while CPU 1's slot is locked by its own.
#[test]
fn inv02_a_migrated_guard_leaves_the_slot_of_its_new_cpu_alone() {
    fn on_one(lock: &Plain) {
        set_current(ONE);
        plain::local(lock);
        plain::local(lock);
    }
    fn on_one_biased(lock: &Biased) {
        set_current(ONE);
        biased::local(lock);
        biased::local(lock);
    }
    fn twice(lock: &Plain) {
        plain::migrate(lock);
        plain::local(lock);
    }
    fn twice_biased(lock: &Biased) {
        biased::migrate(lock);
        biased::local(lock);
    }
    model(|| assert_eq!(two!(plain::make(), twice, on_one), [1, 3]));
    both_modes(|| assert_eq!(two!(biased::make(), twice_biased, on_one_biased), [1, 3]));
}

/// A thread that has no rseq id gets its slot from behind the gate.
#[test]
fn biased_a_foreign_thread_excludes_and_is_excluded() {
    fn foreign(lock: &Biased) {
        take_id();
        biased::local(lock);
    }
    both_modes(|| assert_eq!(two!(biased::make(), biased::local, foreign), [2, 0]));
}

/// `try_` takes a slot or says that another thread has it, and never hangs.
#[test]
fn try_takes_it_or_says_that_it_would_block() {
    fn beside<L>(make: fn() -> L, other: fn(&L), tries: fn(&L) -> bool, all: bool)
    where
        L: IntoIterator<Item = (CpuId, AtomicU64)> + Send + Sync + 'static,
    {
        let lock = Arc::new(make());
        let other = thread::spawn({
            let lock = Arc::clone(&lock);
            move || other(&lock)
        });
        let got = tries(&lock);
        other.join().unwrap();
        assert_eq!(totals(lock), [1 + u64::from(got), u64::from(got && all)]);
    }
    model(|| beside(plain::make, plain::local, plain::try_global, true));
    both_modes(|| beside(biased::make, biased::local, biased::try_global, true));
    both_modes(|| beside(biased::make, biased::remote, biased::try_local, false));
    model(|| beside(plain::make, plain::remote, plain::try_local, false));
}

/// A thread that would have to wait while it holds what another waits for is refused: here both
/// hold a slot and want the other's, or everything.
#[test]
fn holders_are_refused_rather_than_left_waiting_for_each_other() {
    both_modes(|| {
        let lock = Arc::new(biased::make());
        let greedy = |lock: &Biased, cpu: CpuId, other: CpuId| {
            set_current(cpu);
            let _mine = lock.local_on(cpu).unwrap();
            match lock.local_on(other) {
                Ok(guard) => assert_eq!(guard.cpu(), other),
                Err(error) => assert_eq!(error, LockError::Deadlock),
            }
            assert_eq!(lock.global().unwrap_err(), LockError::Deadlock);
        };
        let other = thread::spawn({
            let lock = Arc::clone(&lock);
            move || greedy(&lock, ONE, ZERO)
        });
        greedy(&lock, ZERO, ONE);
        other.join().unwrap();
        assert!(lock.try_global().is_ok(), "everything is free again");
    });
}

/// The same with slots taken by sections: each holder is refused, or waits for one who goes on.
#[test]
fn biased_section_holders_are_refused_rather_than_left_waiting() {
    both_modes(|| {
        let lock = Arc::new(biased::make());
        let other = thread::spawn({
            let lock = Arc::clone(&lock);
            move || {
                set_current(ONE);
                let mine = lock.local().unwrap();
                let refused = lock.local_on(ZERO).map(drop);
                assert!(matches!(refused, Ok(()) | Err(LockError::Deadlock)));
                drop(mine);
            }
        });
        let mine = lock.local().unwrap();
        set_current(ONE); // moved: this CPU's slot is the other thread's
        let refused = lock.local().map(drop);
        assert!(matches!(refused, Ok(()) | Err(LockError::Deadlock)));
        drop(mine);
        other.join().unwrap();
        assert!(lock.try_global().is_ok(), "everything is free again");
    });
}

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    (
        "lglock-foreign-thread-takes-a-word",
        "lglock::biased_a_foreign_thread_excludes_and_is_excluded",
    ),
    ("lglock-gate-does-not-wait-for-a-slot", "lglock::biased_local_and_global_exclude_each_other"),
    ("lglock-gate-skips-heavy-rseq", "lglock::biased_local_and_local_on_exclude_each_other"),
    ("lglock-lock-is-relaxed", "lglock::plain_two_locals_exclude_each_other_on_a_slot"),
    (
        "lglock-pair-in-argument-order",
        "lglock::plain_pairs_named_in_opposite_order_do_not_deadlock",
    ),
    (
        "lglock-unlock-asks-for-the-cpu",
        "lglock::inv02_plain_a_guard_unlocks_its_slot_after_a_migration",
    ),
    (
        "lglock-unlock-asks-for-the-cpu",
        "lglock::inv02_biased_a_guard_unlocks_its_slot_after_a_migration",
    ),
    ("lglock-unlock-changes-nothing", "lglock::plain_two_locals_exclude_each_other_on_a_slot"),
    ("lglock-unlock-changes-nothing", "lglock::biased_local_and_global_exclude_each_other"),
    ("lglock-unlock-ignores-waiters", "lglock::plain_two_locals_exclude_each_other_on_a_slot"),
    ("lglock-unlock-ignores-waiters", "lglock::biased_local_and_global_exclude_each_other"),
    ("lglock-unlock-is-relaxed", "lglock::plain_two_locals_exclude_each_other_on_a_slot"),
    ("lglock-unlock-is-relaxed", "lglock::biased_two_locals_exclude_each_other_on_a_slot"),
    ("lglock-waiter-looks-too-late", "lglock::plain_two_locals_exclude_each_other_on_a_slot"),
    ("lglock-waiter-skips-heavy", "lglock::plain_two_locals_exclude_each_other_on_a_slot"),
    ("lglock-waiter-skips-the-check", "lglock::plain_two_locals_exclude_each_other_on_a_slot"),
    ("lglock-wakes-one-of-many", "lglock::biased_a_local_and_a_global_both_wait_for_a_guard"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] =
    &["lglock-lock-is-relaxed", "lglock-unlock-is-relaxed", "lglock-waiter-skips-heavy"];
