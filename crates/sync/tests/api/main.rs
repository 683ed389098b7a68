//! The futex, the locks and the waits of a normal build.
#![cfg(not(offlock_model))]

mod futex;
mod thread_waker;
mod wait_set;
mod word_lock;

use std::thread;
use std::time::{Duration, Instant};

#[test]
fn the_coarse_clock_goes_as_fast_as_the_fine_one() {
    let (fine, coarse) = (Instant::now(), offlock_sync::coarse_clock());
    thread::sleep(Duration::from_millis(50));
    let went = Duration::from_nanos(offlock_sync::coarse_clock() - coarse);
    let tick = Duration::from_millis(10); // the longest
    assert!(went + tick >= Duration::from_millis(50), "{went:?}");
    assert!(went <= fine.elapsed() + tick, "{went:?}");
}
