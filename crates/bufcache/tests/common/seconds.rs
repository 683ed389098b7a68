//! How long a stress test runs.

use std::env;
use std::time::Duration;

/// `OFFLOCK_STRESS_SECONDS`, or `default` seconds.
pub(crate) fn stress_time(default: u64) -> Duration {
    let asked = env::var("OFFLOCK_STRESS_SECONDS").ok();
    Duration::from_secs(asked.map_or(default, |seconds| seconds.parse().expect("seconds")))
}
