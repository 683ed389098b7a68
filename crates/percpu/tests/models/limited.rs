//! The counter with a limit.

use percpu::sync::cell::UnsafeCell;
use percpu::sync::virtual_cpu::set_current;
use percpu::sync::{Arc, model, thread};
use percpu::{CpuId, LimitError, LimitedCounter};

const CPU: [CpuId; 2] = [CpuId::new(0), CpuId::new(1)];

/// Value 4 of 9, with room and use in the shares of both CPUs and in the pool: (2, 1), (1, 1), and
/// (2, 2). The caller is on CPU 0.
fn spread() -> Arc<LimitedCounter> {
    let counter = LimitedCounter::new(9);
    counter.try_add(3).unwrap();
    set_current(CPU[1]);
    counter.try_add(1).unwrap();
    set_current(CPU[0]);
    Arc::new(counter)
}

/// Room moves from CPU 1 to CPU 0 while somebody looks for all of it: at every moment there is
/// enough, so it must be found.
#[test]
fn inv05_room_that_moves_is_found() {
    model(|| {
        let counter = spread();
        let mover = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                counter.try_sub(1).unwrap();
                set_current(CPU[1]);
                counter.try_add(1).unwrap();
            }
        });
        assert_eq!(counter.try_add(5), Ok(()), "4 or 3 of 9 were in use");
        mover.join().unwrap();
        assert_eq!(counter.try_add(1), Err(LimitError::LimitReached));
        assert_eq!(counter.value(), Ok(9));
    });
}

/// The same for use: what was added may be taken back, wherever it is.
#[test]
fn inv05_use_that_moves_is_found() {
    model(|| {
        let counter = spread();
        let mover = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                counter.try_add(1).unwrap();
                set_current(CPU[1]);
                counter.try_sub(1).unwrap();
            }
        });
        assert_eq!(counter.try_sub(4), Ok(()), "4 or 5 were in use");
        mover.join().unwrap();
        assert_eq!(counter.try_sub(1), Err(LimitError::BelowZero));
        assert_eq!(counter.value(), Ok(0));
    });
}

/// Whatever order the adds had, exactly those were refused that did not fit in it.
#[test]
fn inv05_never_beyond_the_limit() {
    model(|| {
        let counter = Arc::new(LimitedCounter::new(4));
        counter.try_add(1).unwrap();
        let large = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                set_current(CPU[1]);
                counter.try_add(2).is_ok()
            }
        });
        let small = [counter.try_add(1).is_ok(), counter.try_add(1).is_ok()];
        let large = large.join().unwrap();
        assert!(small[0], "two of four at most before it");
        assert_ne!(large, small[1], "either fits, and not both");
        assert_eq!(counter.value(), Ok(if large { 4 } else { 3 }));
    });
}

/// An add on one CPU, taken back on another, beside two that look.
#[test]
fn inv05_the_value_is_between_what_was_and_what_will_be() {
    model(|| {
        let counter = spread();
        let other = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                set_current(CPU[1]);
                counter.try_add(1).unwrap();
                counter.try_add(1).unwrap();
            }
        });
        let first = counter.value().unwrap();
        counter.try_sub(1).unwrap();
        let second = counter.value().unwrap();
        assert!((4..=6).contains(&first) && (first - 1..=5).contains(&second), "{first} {second}");
        other.join().unwrap();
        assert_eq!(counter.value(), Ok(5));
    });
}

/// Two threads on one CPU, of which one makes its share anew while the other uses it.
#[test]
fn inv05_a_share_made_anew_loses_nothing() {
    model(|| {
        let counter = spread();
        let other = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                set_current(CPU[1]);
                counter.try_add(1).unwrap();
            }
        });
        set_current(CPU[1]);
        counter.try_add(2).unwrap(); // more than the share has, and as much as the pool
        other.join().unwrap();
        assert_eq!(counter.value(), Ok(7));
        counter.try_add(2).unwrap();
        assert_eq!(counter.try_add(1), Err(LimitError::LimitReached));
    });
}

/// A limit set below the value refuses adds until the value is below it again.
#[test]
fn inv05_a_lower_limit_holds_from_then_on() {
    model(|| {
        let counter = spread();
        let other = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                set_current(CPU[1]);
                counter.try_sub(1).unwrap();
                counter.try_add(1).is_ok()
            }
        });
        counter.set_limit(3).unwrap();
        assert_eq!(counter.try_add(1), Err(LimitError::LimitReached), "3 or 4 of 3");
        counter.try_sub(1).unwrap();
        let back = other.join().unwrap();
        assert_eq!(counter.value(), Ok(if back { 3 } else { 2 }));
        assert_eq!(counter.try_add(1).is_ok(), !back);
        assert_eq!(counter.limit(), Ok(3));
    });
}

/// Who takes room sees what was done before it was given back: on the same CPU, and on another.
#[test]
fn inv05_room_comes_with_what_happened_before() {
    struct Guarded {
        counter: Arc<LimitedCounter>,
        value: UnsafeCell<u32>,
    }
    // SAFETY: the cell is written before there is room, and read by who got it.
    unsafe impl Sync for Guarded {}

    for taker in CPU {
        model(move || {
            let counter = spread();
            for n in [2, 3] {
                counter.try_add(n).unwrap();
            }
            assert_eq!(counter.try_add(1), Err(LimitError::LimitReached));
            set_current(CPU[1]);
            counter.try_sub(1).unwrap();
            counter.try_add(1).unwrap(); // full again, and CPU 1 has use in its share
            let guarded = Arc::new(Guarded { counter, value: UnsafeCell::new(0) });
            let giver = thread::spawn({
                let guarded = Arc::clone(&guarded);
                move || {
                    set_current(CPU[1]);
                    // SAFETY: nobody gets room before the `try_sub`.
                    guarded.value.with_mut(|value| unsafe { *value = 7 });
                    guarded.counter.try_sub(1).unwrap();
                }
            });
            set_current(taker);
            if guarded.counter.try_add(1).is_ok() {
                // SAFETY: the writer is done, as there was room.
                assert_eq!(guarded.value.with(|value| unsafe { *value }), 7);
            }
            giver.join().unwrap();
        });
    }
}

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("limited-refuses-by-the-pool-alone", "limited::inv05_room_that_moves_is_found"),
    ("limited-shares-out-by-a-store", "limited::inv05_a_share_made_anew_loses_nothing"),
    ("limited-sums-without-taking", "limited::inv05_room_that_moves_is_found"),
    ("limited-sums-without-taking", "limited::inv05_use_that_moves_is_found"),
    ("limited-takes-in-two-steps", "limited::inv05_the_value_is_between_what_was_and_what_will_be"),
    ("limited-takes-one-at-a-time", "limited::inv05_room_that_moves_is_found"),
    ("limited-turns-relaxed", "limited::inv05_room_comes_with_what_happened_before"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] = &["limited-turns-relaxed"];
