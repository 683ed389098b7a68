//! Invariant 20: after a loss of power everything is there that was dirtied before a good sync.
#![cfg(not(offlock_model))]

use proptest::prelude::*;
use testkit::rng::{Rng, seeded};

use crate::storm::{KINDS, Shape, World};

/// What the environment says, or else.
fn asked(name: &str, otherwise: u32) -> u32 {
    std::env::var(name).map_or(otherwise, |number| number.parse().expect("a number"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(asked("PROPTEST_CASES", 64)))]

    /// One thread: every cut point, with faults, in a cache that is too small.
    #[test]
    fn inv20_what_was_synced_survives_every_cut(
        steps in prop::collection::vec((0..KINDS, any::<u64>()), 1..80),
        seed in any::<u64>(),
    ) {
        let shape = Shape { buffers: 10, ..Shape::default() };
        let world = World::new(shape);
        for (kind, seed) in steps {
            world.step(kind, 0, 0..shape.blocks, &mut Rng::with_seed(seed));
        }
        world.check_all(4, &mut Rng::with_seed(seed));
    }
}

/// 1,000 random subsets of what need not have survived, of moments at random, with several threads; of
/// each of a few histories, or of as many as `OFFLOCK_TEARINGS` says. In every other one operations fail, and in
/// every third one there are fewer buffers than threads.
#[test]
fn inv20_threads_lose_nothing_that_was_synced() {
    for seed in 1..=u64::from(asked("OFFLOCK_TEARINGS", 6)) {
        let buffers = if seed.is_multiple_of(3) { 2 } else { 12 };
        let world =
            World::new(Shape { buffers, fails: seed.is_multiple_of(2), ..Shape::default() });
        world.rage(3, seed, 150, || false);
        world.calm();
        world.check(50, 20, &mut seeded(seed));
    }
}

/// What these tests find if a sync does not reach the device.
#[test]
#[should_panic = "was promised"]
fn inv20_a_flush_is_no_sync() {
    let shape = Shape::default();
    let world = World::new(shape);
    (0..40).for_each(|seed| world.step(0, 0, 0..shape.blocks, &mut Rng::with_seed(seed)));
    world.take_a_flush_for_a_sync();
    world.check(1, 2, &mut seeded(1));
}
