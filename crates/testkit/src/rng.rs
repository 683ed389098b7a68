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
