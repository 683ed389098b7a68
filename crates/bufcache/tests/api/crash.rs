//! Invariant 20: after a loss of power everything is there that was dirtied before a good sync.
#![cfg(not(offlock_model))]

use crate::power;

use std::thread;

use bufcache_test::Operation;
use proptest::prelude::*;

use power::World;

const BLOCKS: u64 = 24;

/// Pseudo-random numbers (Marsaglia's xorshift).
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// What the environment says, or else.
fn asked(name: &str, otherwise: u32) -> u32 {
    std::env::var(name).map_or(otherwise, |number| number.parse().expect("a number"))
}

fn step(world: &World, kind: u64, block: u64) {
    match kind % 24 {
        0..8 => drop(world.write(block, kind.is_multiple_of(2))),
        8..12 => world.read(block),
        12..14 => drop(world.sync()),
        14..16 => drop(world.write_through(block)),
        16 => drop(world.device.flush()),
        17 => drop(world.overwrite(block..(block + 3).min(BLOCKS), block.is_multiple_of(2))),
        18 => world.fail_next(Operation::Write),
        19 => world.fail_next(Operation::Sync),
        20 => world.fail_next(Operation::Discard),
        _ => world.reset(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(asked("PROPTEST_CASES", 64)))]

    /// One thread: every cut point, with faults, in a cache that is too small.
    #[test]
    fn inv20_what_was_synced_survives_every_cut(
        steps in prop::collection::vec((0..24_u64, 0..BLOCKS), 1..80),
        seed in any::<u64>(),
    ) {
        let world = World::new(BLOCKS, 10);
        for (kind, block) in steps {
            step(&world, kind, block);
        }
        let mut numbers = random(seed);
        for moment in 0..=world.disk.moments() {
            world.check_moment(moment, 4, &mut numbers);
        }
    }
}

/// 1,000 random subsets of what need not have survived, of moments at random, with several threads; of
/// each of a few histories, or of as many as `OFFLOCK_TEARINGS` says. In every other one syncs fail, and a
/// thread resets the device.
#[test]
fn inv20_threads_lose_nothing_that_was_synced() {
    for seed in 1..=u64::from(asked("OFFLOCK_TEARINGS", 6)) {
        let (world, fails) = (World::new(BLOCKS, 12), seed.is_multiple_of(2));
        thread::scope(|scope| {
            for thread in 0..3_u64 {
                let world = &world;
                scope.spawn(move || {
                    let mut numbers = random(seed * 1000 + thread);
                    for _ in 0..150 {
                        let block = numbers() % (BLOCKS / 3) * 3 + thread; // its own
                        match numbers() % 12 {
                            0..6 => drop(world.write(block, block.is_multiple_of(2))),
                            6 => world.read(numbers() % BLOCKS),
                            7 => drop(world.sync()),
                            8 => drop(world.write_through(block)),
                            9 => drop(world.device.flush()),
                            10 if fails && numbers().is_multiple_of(2) => {
                                world.fail_next(Operation::Sync);
                            }
                            11 if fails => world.reset(),
                            kind => drop(world.overwrite(block..block + 1, kind == 10)),
                        }
                    }
                });
            }
        });
        world.reset();
        let _earlier = world.sync();
        assert!(world.sync());
        world.check(50, 20, random(seed));
    }
}

/// What these tests find if a sync does not reach the device.
#[test]
#[should_panic = "was promised"]
fn inv20_a_flush_is_no_sync() {
    let world = World::new(BLOCKS, 12);
    assert!(world.write(1, false));
    world.take_a_flush_for_a_sync();
    world.check(1, 2, random(1));
}
