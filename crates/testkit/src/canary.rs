//! Values that detect a use after their drop, and a count of the living ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// The number of living canaries of one test. Clones share the number.
#[derive(Clone, Debug, Default)]
pub struct Census(Arc<AtomicI64>);

impl Census {
    /// Begins at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns how many canaries live: negative if one was dropped twice.
    pub fn alive(&self) -> i64 {
        // Ordering: Relaxed; a caller that wants an exact number has joined the other threads.
        self.0.load(Relaxed)
    }
}

/// A value of four equal words: a torn read and a read after the drop are both detected.
#[derive(Debug)]
pub struct Canary {
    words: [u64; 4],
    census: Census,
}

impl Canary {
    /// The value of a dropped canary.
    const DEAD: u64 = u64::MAX;

    /// Makes a living canary. `value` must not be `u64::MAX`.
    pub fn new(value: u64, census: &Census) -> Self {
        // Ordering: Relaxed; a count, it publishes nothing.
        census.0.fetch_add(1, Relaxed);
        Self { words: [value; 4], census: census.clone() }
    }

    /// Returns the value.
    ///
    /// # Panics
    ///
    /// Panics if the canary was dropped, or its words differ.
    pub fn read(&self) -> u64 {
        let value = self.words[0];
        assert!(value != Self::DEAD, "read after its drop");
        assert!(self.words.iter().all(|word| *word == value), "torn: {:?}", self.words);
        value
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.read();
        for word in &mut self.words {
            // SAFETY: `word` is a unique borrow. The write is volatile because the compiler may
            // remove a plain one: no correct program reads the word again.
            unsafe { std::ptr::from_mut(word).write_volatile(Self::DEAD) };
        }
        // Ordering: Relaxed; a count, it publishes nothing.
        self.census.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_canary_is_counted_while_it_lives() {
        let census = Census::new();
        let canary = Canary::new(7, &census);
        assert_eq!((canary.read(), census.alive()), (7, 1));
        drop(canary);
        assert_eq!(census.alive(), 0);
    }

    #[test]
    fn a_torn_and_a_dead_canary_are_detected() {
        let census = Census::new();
        // Not dropped: the drop checks the words as well.
        let mut canary = ManuallyDrop::new(Canary::new(7, &census));
        canary.words[2] = 8;
        assert!(catch_unwind(AssertUnwindSafe(|| canary.read())).is_err());
        canary.words = [Canary::DEAD; 4];
        assert!(catch_unwind(AssertUnwindSafe(|| canary.read())).is_err());
    }
}
