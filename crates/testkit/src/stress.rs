//! The length of a stress test.

use std::env;
use std::time::{Duration, Instant};

use crate::wait::PATIENCE;

/// Returns the time of a stress test: `OFFLOCK_STRESS_SECONDS`, or `default` seconds.
///
/// # Panics
///
/// Panics if the variable is not a number.
pub fn stress_time(default: u64) -> Duration {
    let asked = env::var("OFFLOCK_STRESS_SECONDS").ok();
    let seconds = asked.map_or(default, |seconds| {
        seconds.parse().expect("OFFLOCK_STRESS_SECONDS is a number of seconds")
    });
    Duration::from_secs(seconds)
}

/// Returns whether a stress test keeps running: until `deadline`, and after it for as long as
/// `enough` returns false, for a minute at most.
///
/// The minute is for a machine that runs other programs too. The test must still assert that it did
/// enough.
pub fn keep_running(deadline: Instant, enough: impl FnOnce() -> bool) -> bool {
    let now = Instant::now();
    now < deadline || (now < deadline + PATIENCE && !enough())
}
