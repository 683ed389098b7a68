//! How long a test of many threads runs on a machine that has other work, too.

use std::time::{Duration, Instant};

/// A guess: many times what any test needs beside other programs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether a test goes on: for the time it was given, and then until it has done `enough`, if that
/// takes no more than [`PATIENCE`]. It still has to assert that it did.
pub(crate) fn goes_on(until: Instant, enough: impl FnOnce() -> bool) -> bool {
    let now = Instant::now();
    now < until || (now < until + PATIENCE && !enough())
}
