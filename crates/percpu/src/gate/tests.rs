//! The order of readers and writers, errors, and guards that move or are forgotten.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::inner::READER;
use crate::rseq::section;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::thread;
use crate::words::Words;
use crate::{GateError, ReadWriteGate};

fn gate() -> ReadWriteGate<u64> {
    ReadWriteGate::new(0).unwrap()
}

/// Polls until another thread makes `ready` true.
fn until(ready: impl Fn() -> bool) {
    while !ready() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// When readers and a writer wait for a writer, the readers enter first, although they came last.
#[test]
fn inv16_readers_that_waited_go_before_the_next_writer() {
    for _ in 0..10 {
        let gate = gate();
        let writers = AtomicU64::new(0);
        thread::scope(|scope| {
            let mut first = gate.write().unwrap();
            scope.spawn(|| {
                writers.fetch_add(1, Ordering::Relaxed);
                *gate.write().unwrap() += 10;
            });
            until(|| writers.load(Ordering::Relaxed) == 1);
            for _ in 0..2 {
                scope.spawn(|| assert_eq!(*gate.read().unwrap(), 1));
            }
            until(|| gate.inner.cold.state.lock().waiting == 2);
            *first += 1;
            drop(first);
        });
        assert_eq!(*gate.read().unwrap(), 11);
    }
}

/// Where sections run, a reader with a CPU id does not touch `remote`. The models check that it
/// makes no atomic read-modify-write on the words of the CPUs: a model would lose a reader.
#[test]
fn inv16_a_reader_with_an_id_updates_nothing_by_atomics() {
    let gate = gate();
    for _ in 0..1_000 {
        let inside = [gate.read().unwrap(), gate.try_read().unwrap()];
        let counted = |words: &Words| -> u64 {
            words.iter().fold(0, |sum, word| sum.wrapping_add(word.load(Ordering::Relaxed)))
        };
        assert_eq!(gate.inner.cold.remote.load(Ordering::Relaxed), 0, "entered by an atomic");
        let (one, sections) = if section::available() { (1, "") } else { (READER, "out") };
        assert_eq!(counted(&gate.inner.hot.words), 2 * one, "with{sections} sections");
        drop(inside);
        assert_eq!(gate.inner.cold.remote.load(Ordering::Relaxed), 0, "left by an atomic");
        assert_eq!(counted(&gate.inner.hot.words), 0);
    }
}

#[test]
fn inv16_waiting_for_the_own_writer_is_a_deadlock() {
    let gate = gate();
    let guard = gate.write().unwrap();
    assert_eq!(gate.read().unwrap_err(), GateError::Deadlock);
    assert_eq!(gate.write().unwrap_err(), GateError::Deadlock);
    assert_eq!(GateError::Deadlock.errno(), libc::EDEADLK);
    assert_eq!(gate.try_read().unwrap_err(), GateError::Deadlock);
    assert_eq!(gate.try_write().unwrap_err(), GateError::Deadlock);
    drop(guard);
    assert!(gate.try_read().is_ok() && gate.try_write().is_ok());
}

#[test]
fn try_methods_return_would_block_while_the_gate_is_taken() {
    let gate = gate();
    let writer = gate.write().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let busy = GateError::WouldBlock;
            assert_eq!(gate.try_read().unwrap_err(), busy);
            assert_eq!(gate.try_write().unwrap_err(), busy);
            assert_eq!((busy.errno(), busy.to_string().is_empty()), (libc::EAGAIN, false));
        });
    });
    drop(writer);
    let _reader = gate.read().unwrap();
    assert_eq!(gate.try_write().unwrap_err(), GateError::WouldBlock);
    assert!(gate.try_read().is_ok(), "an attempt leaves the gate open");
}

/// A guard moves to another thread, and the thread that took it exits.
#[test]
fn inv15_a_read_guard_outlives_its_thread() {
    let gate = gate();
    let reader = thread::scope(|scope| scope.spawn(|| gate.read().unwrap()).join().unwrap());
    let busy = Err(GateError::WouldBlock);
    assert_eq!(gate.try_write().map(drop), busy, "the guard of an exited thread still counts");
    drop(reader);
    assert!(gate.try_write().is_ok());
}

#[test]
fn inv15_a_forgotten_guard_stays_inside() {
    let gate = gate();
    std::mem::forget(gate.read());
    assert_eq!(gate.try_write().unwrap_err(), GateError::WouldBlock);
    assert!(gate.try_read().is_ok());

    let gate = self::gate();
    std::mem::forget(gate.write());
    assert_eq!(gate.try_read().unwrap_err(), GateError::Deadlock);
    assert_eq!(gate.write().unwrap_err(), GateError::Deadlock);
}

#[test]
fn a_panic_unlocks() {
    let gate = gate();
    let panic = catch_unwind(AssertUnwindSafe(|| {
        *gate.write().unwrap() = 1;
        let _inside = gate.read().unwrap();
        panic!("while inside");
    }));
    assert!(panic.is_err());
    let panic = catch_unwind(AssertUnwindSafe(|| {
        let mut writer = gate.try_write().expect("the reader is gone");
        *writer += 1;
        panic!("while writing");
    }));
    assert!(panic.is_err());
    assert!(format!("{gate:?}").contains("value: 2"));
    assert_eq!(gate.into_inner(), 2);
}
