//! The asymmetric fences on this kernel: the store-buffer litmus test, and a negative control.
//!
//! Ignored by default, because two threads must run on two CPUs at once. Each half runs for at most
//! `OFFLOCK_STRESS_SECONDS` (default 2).

#[path = "common/store_buffer.rs"]
mod store_buffer;

use std::env;

use offlock_percpu::{capabilities, fence};

use store_buffer::store_buffer;
use testkit::pin::allowed_cpus;
use testkit::stress::stress_time;

#[test]
#[ignore = "stress: seconds on two CPUs"]
fn stress_inv19_light_against_heavy_never_misses_and_without_heavy_does() {
    if allowed_cpus().len() < 2 {
        assert!(env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "the test needs two CPUs");
        return;
    }
    let pair = store_buffer(stress_time(2), fence::light, fence::heavy, [0, 1], 1_000);
    println!("{}: {} rounds of light against heavy", capabilities(), pair.rounds);
    assert!(pair.rounds > 1_000);
    assert_eq!(pair.both_missed, 0, "in {} rounds", pair.rounds);

    // The negative control: without the heavy fence the same rounds see a store buffer.
    let has_membarrier = capabilities().membarrier.is_ok();
    let misses = u64::from(has_membarrier);
    let twin = store_buffer(stress_time(2), fence::light, fence::light, [misses, 10], 0);
    println!("light against light: {} of {} rounds missed", twin.both_missed, twin.rounds);
    assert_eq!(twin.both_missed > 0, has_membarrier, "in {} rounds", twin.rounds);
}
