//! Count requests on every CPU, and read the count in two ways.
//!
//! Run:     cargo run -p examples --example percpu_counter
//! Prints:  40000 requests: 38912 by one load, 40000 by a visit to every CPU

use std::thread;

use offlock_percpu::PerCpuCounter;

const THREADS: u64 = 4;
const REQUESTS: u64 = 10_000; // per thread

static SERVED: PerCpuCounter = PerCpuCounter::new();

fn main() {
    thread::scope(|s| {
        for _ in 0..THREADS {
            s.spawn(|| (0..REQUESTS).for_each(|_| SERVED.increment()));
        }
    });

    // The sum is exact, as no thread is counting any more. The other count is off by less than a
    // batch for each CPU.
    let (sum, near) = (SERVED.sum(), SERVED.approximate());
    println!("{sum} requests: {near} by one load, {sum} by a visit to every CPU");
    assert_eq!(sum, 40_000);
}
