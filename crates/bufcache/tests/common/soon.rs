//! What another thread is about to do.

use std::thread;
use std::time::{Duration, Instant};

/// Waits until it is so, for a minute at most.
pub(crate) fn soon(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}
