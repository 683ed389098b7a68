//! The futex, the locks and the waits of a normal build.
#![cfg(not(offlock_model))]

mod futex;
mod thread_waker;
mod wait_set;
mod word_lock;

use std::thread;
use std::time::{Duration, Instant};

/// A tick of the kernel that is late spoils a try.
#[test]
fn the_coarse_clock_goes_as_fast_as_the_fine_one() {
    let (slept, tick) = (Duration::from_millis(50), Duration::from_millis(10)); // the longest tick
    let mut tries = (0..100).map(|_| {
        let (fine, coarse) = (Instant::now(), offlock_sync::coarse_clock());
        thread::sleep(slept);
        (Duration::from_nanos(offlock_sync::coarse_clock() - coarse), fine.elapsed())
    });
    assert!(tries.any(|(went, fine)| went + tick >= slept && went <= fine + tick));
}
