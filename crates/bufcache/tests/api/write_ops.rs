//! The steps of the machine in one thread, as the fuzzer makes them, on its corpus and on random bytes; and of threads
//! whose devices lose their power.

use std::sync::Arc;

use proptest::prelude::*;
use testkit::rng::seeded;

use crate::machine::{REVERTS, Shape, THREADS, World, run};
use crate::world::Operation;

/// What the environment says, or else.
fn asked(name: &str, otherwise: u32) -> u32 {
    std::env::var(name).map_or(otherwise, |number| number.parse().expect("a number"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(asked("PROPTEST_CASES", 200)))]

    #[test]
    fn inv22_random_operations_and_errors_lose_nothing(
        first in any::<u8>(),
        steps in prop::collection::vec(any::<[u8; 2]>(), 0..300),
    ) {
        for first in [first & !REVERTS, first | REVERTS] {
            run(&[&[first], steps.as_flattened()].concat(), None);
        }
    }
}

#[test]
fn inv22_every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/bufcache_writes");
    testkit::corpus::replay(corpus, 12, 1_000, |input| {
        let steps = run(input, None);
        let mut input = input.to_vec();
        if let Some(first) = input.first_mut() {
            *first ^= REVERTS;
            run(&input, None);
        }
        steps
    });
}

/// Steps of several threads, and images of some moments of them: six histories, or as many as `OFFLOCK_TEARINGS` says.
/// In every other one operations fail, and in every third one there are fewer buffers than threads.
#[test]
fn inv20_threads_lose_nothing_that_was_synced() {
    for seed in 1..=u64::from(asked("OFFLOCK_TEARINGS", 6)) {
        let buffers = if seed.is_multiple_of(3) { 2 } else { 12 };
        let shape = Shape { buffers, fails: seed.is_multiple_of(2), ..THREADS };
        let world = Arc::new(World::new(shape));
        world.rage(3, seed, 150, || false);
        world.calm();
        world.check_power_cuts(50, 20, &mut seeded(seed));
    }
}

/// What that test finds if a sync does not reach the device.
#[test]
#[should_panic = "was promised"]
fn inv20_a_sync_of_threads_that_does_nothing_is_found() {
    let lies = Some(Operation::Sync);
    let world = Arc::new(World::new(Shape { fails: false, lies, ..THREADS }));
    world.rage(1, 1, 150, || false);
    world.check_power_cuts(1, 2, &mut seeded(1));
}

/// A block is written, and synced; another is written.
const SYNCED: [u8; 9] = [2, 5, 2, 10, 0, 5, 4, 23, 0];

/// What these tests find where a sync does not reach the device.
#[test]
#[should_panic = "was promised"]
fn inv22_a_sync_that_does_nothing_is_found() {
    run(&SYNCED, Some(Operation::Sync));
}

/// What these tests find where a write does not reach the device.
#[test]
#[should_panic = "written back"]
fn inv22_a_write_that_does_nothing_is_found() {
    run(&[2, 5, 2, 5, 6, 10, 0], Some(Operation::Write));
}

/// Each is a block that is lost or counts as durable where the cache forgets, beside an operation that stands
/// still in the device, what it has to remember.
#[test]
fn inv20_what_is_written_beside_a_sync_is_not_durable_by_it() {
    const SYNC: [u8; 2] = [10, 0];
    const GOES_ON: [u8; 2] = [21, 0];
    const LOOK: [u8; 2] = [23, 7];
    let histories: [&[[u8; 2]]; 5] = [
        // A bypass of block 2 stands still, and a sync begins and ends: a durable write of it syncs again.
        &[[21, 4], SYNC, GOES_ON, [12, 4], LOOK],
        // The same of a write past the cache, and of a discard that the device has done already.
        &[[5, 4], SYNC, [21, 4], SYNC, GOES_ON, [12, 4], LOOK],
        &[[5, 4], SYNC, [21 + 24 * 6, 4], SYNC, GOES_ON, [12, 4], LOOK],
        // A sync stands still that is about to fail. A device that cannot discard block 2 has its write to lose
        // still.
        &[[5, 4], [9, 0], [21 + 24 * 3, 24], [14 + 24 * 2, 4], GOES_ON, [19, 0], SYNC, LOOK],
        // The sync within a durable write of neighbours fails: the retries one by one do not report it again.
        &[[5, 2], [5, 4], [17 + 24 * 4, 0], [12 + 24, 2], [19, 0], SYNC, LOOK],
    ];
    assert_eq!(run(&SYNCED, None), 4);
    for history in histories {
        let input = [&[0], history.as_flattened()].concat();
        assert_eq!(run(&input, None), history.len());
    }
}

/// A write past the cache is in flight beside a sync that fails, and may be given up by it: a reset that did not
/// wait for its end would let the next sync count it as durable.
#[test]
fn inv20_a_reset_waits_for_the_writes_past_the_cache_that_a_failed_sync_may_have_given_up() {
    for first in [0, REVERTS] {
        let input = [first, 233, 43, 141, 13, 178, 47, 67, 29];
        assert_eq!(run(&input, None), 4);
    }
}

/// Block 2 is written, evicted and read again, after the device has given the write up or before that.
#[test]
fn inv24_what_was_read_again_is_lost_with_the_write() {
    const EVICTED: [[u8; 2]; 4] = [[5, 4], [9, 0], [20, 0], [0, 6]];
    const GIVES_UP: [u8; 2] = [113, 12];
    const READ: [u8; 2] = [0, 4];
    // The next sync fails, and a reset follows.
    const RESET: [[u8; 2]; 3] = [[113, 0], [10, 0], [19, 0]];
    for first in [0, REVERTS] {
        for again in [&[GIVES_UP, READ][..], &[READ]] {
            let history = [&EVICTED, again, &RESET, &[READ]].concat();
            let input = [&[first], history.as_flattened()].concat();
            assert_eq!(run(&input, None), history.len());
        }
    }
}

/// A block of which this thread has a read guard is written in no way.
#[test]
fn inv22_a_writer_does_not_wait_for_its_own_guard() {
    for how in 0..8 {
        assert_eq!(run(&[2, 5, 4, 3 + 24 * 5, 4, 5 + 24 * how, 4, 9, 4], None), 4);
    }
}
