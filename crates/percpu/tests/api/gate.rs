//! `ReadWriteGate` on this kernel: readers and writers that move, and a writer among many readers.
//!
//! The ignored test runs for `OFFLOCK_STRESS_SECONDS` (default 5).

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread;
use std::time::Instant;

use offlock_percpu::{ReadWriteGate, capabilities};

use crate::no_id::take_id;
use testkit::pin::{allowed_cpus, pin_to};
use testkit::stress::keep_running;
use testkit::stress::stress_time;

/// A writer enters although two readers overlap so that one of them is always inside.
#[test]
fn inv16_a_writer_is_not_starved_by_readers_that_overlap() {
    let gate = ReadWriteGate::new(0_u32).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut guard = gate.try_read().ok();
                while !stop.load(Relaxed) {
                    guard = gate.try_read().ok().or_else(|| {
                        guard.take();
                        gate.read().ok()
                    });
                }
            });
        }
        for _ in 0..100 {
            *gate.write().unwrap() += 1;
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(gate.into_inner(), 100);
}

/// The value inside the gate: two halves that a writer changes one after the other.
struct Halves(UnsafeCell<[u64; 2]>);

// SAFETY: all accesses are inside the gate, which is the property under test.
unsafe impl Sync for Halves {}

#[test]
#[ignore = "stress: five seconds of readers and writers"]
fn stress_inv16_no_reader_sees_half_of_a_write() {
    let until = Instant::now() + stress_time(5);
    let (gate, cpus) =
        (ReadWriteGate::new(Halves(UnsafeCell::new([0; 2]))).unwrap(), allowed_cpus());
    let (reads, writes) = (AtomicU64::new(0), AtomicU64::new(0));
    let on = || keep_running(until, || writes.load(Relaxed) > 100 && reads.load(Relaxed) > 10_000);
    thread::scope(|scope| {
        for seed in 0..3 {
            let (gate, cpus, reads, on) = (&gate, &cpus, &reads, &on);
            scope.spawn(move || {
                if seed == 2 {
                    take_id();
                }
                for round in 0_usize.. {
                    let guard = gate.read().unwrap();
                    let halves = guard.0.get().cast::<u64>();
                    let other = halves.wrapping_add(1);
                    // SAFETY: the first half; no writer is inside.
                    let first = unsafe { halves.read_volatile() };
                    if round % 64 == 0 {
                        pin_to(&[cpus[(round / 64 + seed) % cpus.len()]]); // inside the gate
                    }
                    for _ in 0..round % 8 {
                        // Time in which a writer that missed this reader would write.
                        std::hint::spin_loop();
                    }
                    // SAFETY: the second half; no writer is inside.
                    let second = unsafe { other.read_volatile() };
                    assert_eq!(first, second, "a writer is inside");
                    drop(guard);
                    if round % 1024 == 0 {
                        reads.fetch_add(1024, Relaxed);
                        if !on() {
                            return;
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            for round in 0_u64.. {
                if !on() {
                    return;
                }
                // Mostly without waiting, to try often and at every step of a reader's entry.
                let wait = round % 64 == 0;
                let guard = if wait { gate.write().ok() } else { gate.try_write().ok() };
                if let Some(mut guard) = guard {
                    let halves = guard.0.get_mut();
                    halves[0] += 1;
                    std::hint::black_box(&mut *halves);
                    halves[1] += 1;
                    writes.fetch_add(1, Relaxed);
                }
            }
        });
    });
    let writes = writes.into_inner();
    println!("{}: {reads:?} reads, {writes} writes", capabilities());
    assert_eq!(gate.into_inner().0.into_inner(), [writes; 2]);
    assert!(writes > 100 && reads.into_inner() > 10_000);
}
