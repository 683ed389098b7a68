//! Count requests on every CPU, and read the count while they go on.
//!
//! Run:     cargo run -p examples --example percpu_counter
//! Prints:  17204 requests so far
//!          40000 requests

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
        // A visit to every CPU: each request that is over counts, and none counts twice.
        println!("{} requests so far", SERVED.sum());
    });
    println!("{} requests", SERVED.sum());
    assert_eq!(SERVED.sum(), 40_000);
}
