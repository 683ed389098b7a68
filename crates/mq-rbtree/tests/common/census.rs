//! Values that know whether they live, and a count of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// How many values of one test live.
#[derive(Clone, Default)]
pub(crate) struct Census(Arc<AtomicI64>);

impl Census {
    pub(crate) fn alive(&self) -> i64 {
        self.0.load(Relaxed)
    }
}

/// Knows whether it lives, and is large enough to be seen half written.
pub(crate) struct Canary {
    words: [u64; 4],
    census: Census,
}

impl Canary {
    pub(crate) fn new(value: u64, census: &Census) -> Self {
        census.0.fetch_add(1, Relaxed);
        Self { words: [value; 4], census: census.clone() }
    }

    pub(crate) fn read(&self) -> u64 {
        let value = self.words[0];
        assert!(value != u64::MAX, "read after its drop");
        assert!(self.words.iter().all(|word| *word == value), "torn: {:?}", self.words);
        value
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.read();
        for word in &mut self.words {
            // SAFETY: ours; volatile, as nobody is to read it.
            unsafe { std::ptr::from_mut(word).write_volatile(u64::MAX) };
        }
        self.census.0.fetch_sub(1, Relaxed);
    }
}
