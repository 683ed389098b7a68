//! Share one hot object between threads, end it, and release it after the last of them.
//!
//! Run:     cargo run -p examples --example percpu_ref
//! Prints:  4 threads served at least 4000 requests; the device was closed 1 time

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use offlock_percpu::PercpuRef;

const THREADS: u64 = 4;
const REQUESTS: u64 = 1_000; // per thread

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let closed = Arc::new(AtomicU64::new(0));
    let device = PercpuRef::new({
        let closed = Arc::clone(&closed);
        move || {
            closed.fetch_add(1, Ordering::Relaxed);
        }
    });

    let served = AtomicU64::new(0);
    thread::scope(|s| {
        for _ in 0..THREADS {
            s.spawn(|| {
                // Every request holds the device; while it is live they share no cache line for it.
                while let Some(_device) = device.try_get() {
                    served.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while served.load(Ordering::Relaxed) < THREADS * REQUESTS {
            thread::yield_now();
        }
        device.kill() // from here on no request begins
    })?;

    let closed = closed.load(Ordering::Relaxed);
    println!(
        "{THREADS} threads served at least {} requests; the device was closed {closed} time",
        THREADS * REQUESTS
    );
    assert!(device.is_zero() && closed == 1);
    Ok(())
}
