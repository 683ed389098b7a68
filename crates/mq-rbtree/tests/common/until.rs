//! Waiting for what another thread is about to do.

use std::thread;
use std::time::{Duration, Instant};

/// Waits until `what` holds; fails after a time that nothing needs.
#[track_caller]
pub(crate) fn wait_until(what: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !what() {
        assert!(Instant::now() < end, "this never came true");
        thread::sleep(Duration::from_micros(200));
    }
}
