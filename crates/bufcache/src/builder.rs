//! The builder of a cache.

use std::time::Duration;

use crate::cache::{self, Limits};
use crate::error::BuildError;
use crate::frames::MOST_FRAMES;
use crate::handle::Cache;
use crate::policy::{Eviction, Policy, sampled_blocks};

/// The options of a [`Cache`] to build.
#[derive(Clone, Debug)]
#[must_use = "a builder makes no cache before `build`"]
pub struct Builder {
    capacity: usize,
    block_size: usize,
    eviction: Eviction,
    patience: Duration,
    limits: Limits,
}

impl Cache {
    /// Creates a cache of `capacity` bytes, in blocks of 4,096 bytes.
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    pub fn new(capacity: usize) -> Result<Self, BuildError> {
        Self::builder(capacity).build()
    }

    /// Returns a builder of a cache of `capacity` bytes, to choose the block size, eviction and limits.
    pub fn builder(capacity: usize) -> Builder {
        Builder::new(capacity)
    }
}

impl Builder {
    fn new(capacity: usize) -> Self {
        Self {
            capacity,
            block_size: 4096,
            eviction: Eviction::default(),
            patience: Duration::from_secs(1),
            limits: Limits::default(),
        }
    }

    /// Sets the size of the blocks in bytes: a power of two from 512 to 65,536, 4,096 by default. A
    /// program with blocks of two sizes has two caches.
    pub fn block_size(mut self, block_size: usize) -> Self {
        self.block_size = block_size;
        self
    }

    /// Sets how buffers are chosen for eviction.
    pub fn eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// Sets how long a miss waits if all buffers are in use, and other calls for guards of other
    /// threads: one second by default.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets how long a block stays dirty before the cleaner writes it: five seconds by default. The
    /// cleaner checks five times per second.
    pub fn write_back_after(mut self, age: Duration) -> Self {
        self.limits.age = age;
        self
    }

    /// Sets the limits of the dirty share of the capacity, in percent: 10 and 75 by default. Above
    /// `begin`, the cleaner writes without delay. Above `most`, a thread that dirties another block
    /// writes some blocks first.
    pub fn dirty_limits(mut self, begin: u32, most: u32) -> Self {
        let of_256 = |percent: u32| percent.min(100) * 256 / 100;
        (self.limits.begin, self.limits.most) = (of_256(begin), of_256(most));
        self
    }

    /// Builds the cache. Reserves its memory, which the system provides at first use, and allocates
    /// its table, about 5 % of the capacity with blocks of 4,096 bytes.
    ///
    /// The capacity is rounded down to whole blocks.
    ///
    /// # Errors
    ///
    /// [`BuildError::BlockSize`] and [`BuildError::Capacity`] for a size out of range, and
    /// [`BuildError::NoMemory`].
    pub fn build(self) -> Result<Cache, BuildError> {
        let size = self.block_size;
        if !size.is_power_of_two() || !(512..=65_536).contains(&size) {
            return Err(BuildError::BlockSize(size));
        }
        let count = self.capacity / size;
        if count == 0 || count > MOST_FRAMES {
            return Err(BuildError::Capacity(self.capacity));
        }
        let (rule, sampled) = match self.eviction {
            Eviction::Adaptive => (Eviction::A2, sampled_blocks(count)),
            fixed => (fixed, 0),
        };
        let policy = Policy::new(rule, count).map_err(|_| BuildError::NoMemory)?;
        let waits = (self.patience, self.limits);
        let shared = cache::make((count, size.ilog2()), (policy, sampled), waits)
            .map_err(|_| BuildError::NoMemory)?;
        Ok(Cache::from_shared(shared))
    }
}
