//! Random numbers for tests: reproducible, and the seed is printed on failure.

use std::ops::{Deref, DerefMut};
use std::thread;

pub use fastrand::Rng;

/// Returns a generator that always makes the same numbers for the same `seed`.
pub fn seeded(seed: u64) -> SeededRng {
    SeededRng { seed, rng: Rng::with_seed(seed) }
}

/// A [`fastrand::Rng`] that prints its seed when its thread unwinds.
#[derive(Debug)]
pub struct SeededRng {
    seed: u64,
    rng: Rng,
}

impl Deref for SeededRng {
    type Target = Rng;

    fn deref(&self) -> &Rng {
        &self.rng
    }
}

impl DerefMut for SeededRng {
    fn deref_mut(&mut self) -> &mut Rng {
        &mut self.rng
    }
}

impl Drop for SeededRng {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the random numbers of this thread came from seed {}", self.seed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_numbers() {
        let numbers = |seed| {
            let mut rng = seeded(seed);
            (0..8).map(|_| rng.u64(..)).collect::<Vec<_>>()
        };
        assert_eq!(numbers(0), numbers(0));
        assert_ne!(numbers(0), numbers(1));
    }
}
