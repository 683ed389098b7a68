//! Count events per CPU: one slot for every CPU that this machine may ever have.
//!
//! Run:     cargo run -p examples --example current_cpu
//! Prints:  rseq ids in use, sections in use, membarrier in use
//!          cpu 0: 1970 events
//!          cpu 1: 2030 events

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use offlock_percpu::{PerCpu, capabilities, current_cpu};

const THREADS: u64 = 4;
const EVENTS: u64 = 1_000; // per thread

fn main() {
    let slots = PerCpu::new(|_cpu| AtomicU64::new(0)); // two CPUs never share a cache line

    thread::scope(|s| {
        for _ in 0..THREADS {
            s.spawn(|| {
                for _ in 0..EVENTS {
                    // The index is in bounds, always. The thread may be moved before it adds, so
                    // the slot is an atomic all the same: rarely contended, never wrong.
                    slots[current_cpu()].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });

    println!("{}", capabilities());
    let mut sum = 0;
    for (cpu, events) in slots.iter() {
        let events = events.load(Ordering::Relaxed);
        println!("{cpu}: {events} events");
        sum += events;
    }
    assert_eq!(sum, THREADS * EVENTS, "no event is lost");
}
