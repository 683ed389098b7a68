//! Waiting for another thread's effect.

use std::thread;
use std::time::{Duration, Instant};

/// A guess: much longer than any test waits.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` returns true.
///
/// # Panics
///
/// Panics after a minute.
#[track_caller]
pub fn wait_until(condition: impl FnMut() -> bool) {
    wait_for("the condition", condition);
}

/// [`wait_until`], where the panic names what was waited for.
#[track_caller]
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}
