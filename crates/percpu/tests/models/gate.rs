//! The read-write gate.
//!
//! The value is two plain numbers that a writer changes one after the other: a reader that is
//! inside with it reads two different ones, and under loom the cell behind the guards fails the
//! model for any two accesses that nothing orders. A wake-up that is lost is a deadlock.

use std::sync::atomic::Ordering;

use offlock_percpu::sync::atomic::AtomicUsize;
use offlock_percpu::sync::virtual_cpu::{set_current, take_id};
use offlock_percpu::sync::{Arc, thread};
use offlock_percpu::{CpuId, GateError, ReadGuard, ReadWriteGate};

use super::{Long, both_modes, with_sections};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("close: no section still enters", "gate::inv16_an_entry_under_way_is_seen"),
    ("sum: the reads are done", "gate::inv16_no_reader_is_inside_with_a_writer"),
    ("open: the write is done", "gate::inv16_no_reader_is_inside_with_a_writer"),
    ("sum: the remote readers", "gate::inv16_a_reader_without_id_is_waited_for"),
    ("leave: before the look at the gate", "gate::inv16_the_writer_is_woken_by_who_leaves"),
    ("open: wake the readers", "gate::inv16_readers_and_writers_all_get_in"),
    ("enter: wake the next writer", "gate::inv16_readers_and_writers_all_get_in"),
    (
        "downgrade: enter before the writer leaves",
        "gate::inv16_no_writer_comes_between_writing_and_reading",
    ),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] =
    &["sum: the reads are done", "open: the write is done", "leave: before the look at the gate"];

type Gate = ReadWriteGate<[u64; 2]>;

fn gate() -> Arc<Gate> {
    Arc::new(ReadWriteGate::new([0, 0]).unwrap())
}

fn look(guard: &ReadGuard<'_, [u64; 2]>) -> u64 {
    let first = guard[0];
    thread::yield_now();
    assert_eq!(first, guard[1], "a writer is inside");
    first
}

fn increment(gate: &Gate) {
    let mut guard = gate.write().unwrap();
    guard[0] += 1;
    thread::yield_now();
    guard[1] += 1;
}

fn spawn(gate: &Arc<Gate>, f: impl FnOnce(&Gate) + Send + 'static) -> thread::JoinHandle<()> {
    let gate = Arc::clone(gate);
    thread::spawn(move || f(&gate))
}

/// Readers on both CPUs, one of which moves while inside, and a writer.
#[test]
fn inv16_no_reader_is_inside_with_a_writer() {
    both_modes(|| {
        let gate = gate();
        let writer = spawn(&gate, increment);
        set_current(CpuId::new(1));
        if let Ok(guard) = gate.try_read() {
            look(&guard);
            set_current(CpuId::new(0));
        }
        let again = gate.try_read();
        again.iter().for_each(|guard| assert!(look(guard) <= 1));
        drop(again);
        writer.join().unwrap();
        assert_eq!(look(&gate.read().unwrap()), 1);
    });
}

/// Entries that have seen the gate open when the writer closes it: several, so that shuttle finds
/// one that commits late.
#[test]
fn inv16_an_entry_under_way_is_seen() {
    with_sections(true, || {
        let gate = gate();
        let writer = spawn(&gate, |gate| (0..4).for_each(|_| increment(gate)));
        set_current(CpuId::new(1));
        for _ in 0..4 {
            gate.try_read().iter().for_each(|guard| assert!(look(guard) <= 4));
        }
        writer.join().unwrap();
        assert_eq!(look(&gate.read().unwrap()), 4);
    });
}

/// Two readers of one CPU. Sections are plain loads and stores, so that an atomic
/// read-modify-write of the word among them would lose one or the other.
#[test]
fn inv16_reading_is_sections_and_nothing_else() {
    with_sections(true, || {
        let gate = gate();
        let readers = [(); 2].map(|()| spawn(&gate, |gate| drop(gate.read().unwrap())));
        for reader in readers {
            reader.join().unwrap();
        }
        assert!(gate.try_write().is_ok(), "the word is 0 again");
    });
}

/// A reader that counts in the remote word.
#[test]
fn inv16_a_reader_without_id_is_waited_for() {
    with_sections(true, || {
        let gate = gate();
        let reader = spawn(&gate, |gate| {
            take_id();
            let guard = gate.read().unwrap();
            for _ in 0..8 {
                look(&guard); // long enough for shuttle to put all of a writer in between
            }
        });
        increment(&gate);
        reader.join().unwrap();
        assert_eq!(look(&gate.read().unwrap()), 1);
    });
}

/// The reader is inside when the writer comes, and leaves by another CPU.
#[test]
fn inv16_the_writer_is_woken_by_who_leaves() {
    both_modes(|| {
        let gate = gate();
        let inside = gate.read().unwrap();
        let writer = spawn(&gate, increment);
        // No yield before the guard goes: in loom a thread does not read, after it yielded, an old
        // value that it knew before, and this model is about such a read.
        assert_eq!(*inside, [0, 0]);
        set_current(CpuId::new(1));
        drop(inside);
        writer.join().unwrap();
        assert_eq!(look(&gate.read().unwrap()), 1);
    });
}

/// The same after a stay that lets the writer come to its wait.
#[test]
fn inv16_a_wake_up_does_not_slip_past_the_wait() {
    both_modes(|| {
        let gate = gate();
        let inside = gate.read().unwrap();
        let writer = spawn(&gate, increment);
        // Shuttle needs time to put the writer there; loom would let the writer run to its wait
        // at the first yield, and that is too late.
        let looks = if cfg!(offlock_loom) { 0 } else { 6 };
        (0..looks).for_each(|_| _ = look(&inside));
        drop(inside);
        writer.join().unwrap();
        assert_eq!(look(&gate.read().unwrap()), 1);
    });
}

/// One writer after the other, and a reader that may come between them and must not sleep on.
#[test]
fn inv16_readers_and_writers_all_get_in() {
    let _long = Long::mark();
    both_modes(|| {
        let gate = gate();
        let writer = spawn(&gate, increment);
        let reader = spawn(&gate, |gate| {
            set_current(CpuId::new(1));
            look(&gate.read().unwrap());
        });
        increment(&gate);
        writer.join().unwrap();
        reader.join().unwrap();
        assert_eq!(look(&gate.read().unwrap()), 2);
    });
}

/// A writer goes on reading: what it reads is what it wrote, and the next writer waits for it.
#[test]
fn inv16_no_writer_comes_between_writing_and_reading() {
    both_modes(|| {
        let gate = gate();
        let other = spawn(&gate, increment);
        set_current(CpuId::new(1));
        let mut writer = gate.write().unwrap();
        writer[0] += 1;
        writer[1] += 1;
        let wrote = writer[0];
        let reader = writer.downgrade();
        set_current(CpuId::new(0));
        assert_eq!(look(&reader), wrote);
        drop(reader);
        other.join().unwrap();
        assert_eq!(look(&gate.read().unwrap()), 2);
    });
}

/// `try_write` gets in alone or not at all, and lets the others in again.
#[test]
fn inv16_try_write_is_alone_or_refused() {
    both_modes(|| {
        let gate = gate();
        let written = Arc::new(AtomicUsize::new(0));
        let other = spawn(&gate, {
            let written = Arc::clone(&written);
            move |gate| {
                if let Ok(mut guard) = gate.try_write() {
                    guard[0] += 1;
                    thread::yield_now();
                    guard[1] += 1;
                    written.store(1, Ordering::Relaxed);
                }
            }
        });
        set_current(CpuId::new(1));
        look(&gate.read().unwrap());
        other.join().unwrap();
        assert_eq!(look(&gate.read().unwrap()), written.load(Ordering::Relaxed) as u64);
        let guard = gate.try_write().expect("no reader is inside");
        assert_eq!(gate.read().unwrap_err(), GateError::Deadlock);
        assert_eq!(gate.try_read().unwrap_err(), GateError::Deadlock);
        drop(guard);
    });
}
