//! Count requests on every CPU, and admit no more at a time than a budget allows.
//!
//! Run:     cargo run -p examples --example percpu_counter
//! Prints:  40000 requests: 39936 by one load, 40000 by a visit to every CPU
//!          0 of 64 slots in use, 8 requests refused

use std::thread;

use percpu::{LimitError, LimitedCounter, PerCpuCounter};

const THREADS: u64 = 4;
const REQUESTS: u64 = 10_000; // per thread
const SLOTS: u64 = 64;

static SERVED: PerCpuCounter = PerCpuCounter::new();

fn main() -> Result<(), LimitError> {
    let slots = LimitedCounter::new(SLOTS);
    let refused = PerCpuCounter::new();

    thread::scope(|s| {
        for _ in 0..THREADS {
            s.spawn(|| {
                for _ in 0..REQUESTS {
                    // Each of us holds one slot at a time, so there is always room: no guess.
                    slots.try_add(1).expect("fewer threads than slots");
                    SERVED.increment();
                    slots.try_sub(1).expect("ours");
                }
                // One more than there is in all.
                (0..2).for_each(|_| refused.add(i64::from(slots.try_add(SLOTS + 1).is_err())));
            });
        }
    });

    // Exact, as nobody is counting any more. The other is off by less than a batch per CPU.
    let (sum, near) = (SERVED.sum(), SERVED.approximate());
    println!("{sum} requests: {near} by one load, {sum} by a visit to every CPU");
    println!("{} of {SLOTS} slots in use, {} requests refused", slots.value()?, refused.sum());
    assert_eq!((sum, slots.value()?, refused.sum()), (40_000, 0, 8));
    Ok(())
}
